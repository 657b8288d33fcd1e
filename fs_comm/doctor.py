"""What fs_comm finds on a machine or in a job, what it would take for each two ranks and why, and how fast each is.

python -m fs_comm.doctor                                       # this machine, two ranks of its own
torchrun --nnodes 2 --nproc-per-node 4 ... -m fs_comm.doctor   # a job, as it will run
"""

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fs_comm.errors import CommError
from fs_comm.group import SmFreeGroup, new_group
from fs_comm.roads import is_forbidden
from fs_comm.transports.verbs import VerbsConfig, probe_verbs
from fs_comm.transports.verbs_binding import NoBinding, load_binding
from fs_comm.transports.verbs_gid import read_gid_table
from fs_comm.transports.verbs_ports import list_ports

MIB = 1 << 20
ROADS: dict[str, tuple[tuple[str, ...], str]] = {
    "attach": (("shm",), "1"),
    "staged": (("shm",), "0"),
    "verbs": (("verbs",), "1"),
    "gloo": (("gloo",), "1"),
}
"""Each road by itself: the transports that lead to it, and `FS_COMM_ATTACH`."""


def machine() -> dict[str, str | list[str]]:
    """What this host offers, as text; raises nothing that the state of a machine can cause."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "RDMA ports": [f"{p}: {p.unusable or 'usable'} ({p.link_layer})" for p in list_ports()] or ["none"],
        "GIDs": [f"{p} GID {gid}" for p in list_ports() for gid in read_gid_table(p)] or ["none"],
        "RDMA binding": _binding(),
        "verbs would use": probe_verbs().reason,
        "locked memory": "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB (ulimit -l)",
        "/dev/shm": _shm(),
        "CUDA registration": _cuda(),
    }


def _binding() -> str:
    try:
        return load_binding().name
    except NoBinding as error:
        return f"none: {error}"


def _shm() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return f"not there ({error.strerror}); not needed, shared memory comes from memfd"
    size, free = (n * found.f_frsize / 2**30 for n in (found.f_blocks, found.f_bavail))
    return f"{free:.1f} of {size:.1f} GiB free; not needed, shared memory comes from memfd"


def _cuda() -> str:
    """Registers shared memory with the driver, as the staging of CUDA tensors does."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from fs_comm import driver

    fd = os.memfd_create("fs_comm_doctor", os.MFD_CLOEXEC)
    os.ftruncate(fd, 16 * MIB)
    shared = mmap.mmap(fd, 16 * MIB)
    os.close(fd)
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    try:
        torch.zeros(1, device="cuda")
        began = time.perf_counter()
        driver.register(memory.data_ptr(), 16 * MIB)
        took_ms = 1e3 * (time.perf_counter() - began)
        driver.unregister(memory.data_ptr())
    except (CommError, RuntimeError) as error:
        return f"shared memory cannot be registered: {error}"
    return f"{torch.cuda.get_device_name()}: 16 MiB of shared memory registered in {took_ms:.1f} ms"


def measure(group: SmFreeGroup, num_bytes: int) -> dict[str, float]:
    """Microseconds of an AllToAll of next to nothing; GB/s into a rank, of AllToAll and AllGather. Medians."""
    size = group.size()
    small = torch.zeros(size), torch.zeros(size)
    out, source = (torch.zeros(num_bytes // size * size, dtype=torch.uint8) for _ in range(2))
    crossing = len(out) * (size - 1) / size
    latency_s = _median(lambda: dist.all_to_all_single(*small, group=group), 50)
    all_to_all_s = _median(lambda: dist.all_to_all_single(out, source, group=group), 5)
    parts, part = list(out.chunk(size)), source[: len(source) // size]
    all_gather_s = _median(lambda: dist.all_gather(parts, part, group=group), 5)
    return {
        "latency_us": 1e6 * latency_s,
        "all_to_all_gb_per_s": crossing / all_to_all_s / 1e9,
        "all_gather_gb_per_s": crossing / all_gather_s / 1e9,
    }


def _median(call: Any, times: int) -> float:
    call()
    seconds: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[times // 2]


def examine_job(num_bytes: int) -> dict[str, Any]:
    """What all ranks of the default group found together; each of them must call it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = new_group(timeout_s=60)
    assert isinstance(group, SmFreeGroup)
    mine = {
        "host": f"{os.uname().nodename} ({group.host[-12:]})",
        "machine": machine(),
        "routes": {peer: (route.road, route.reason) for peer, route in group.routes.items()},
    }
    told: list[Any] = [None] * size
    dist.all_gather_object(told, mine)
    figures: dict[str, Any] = {}
    if size > 1:
        figures["as chosen"] = {"road": group.road, **measure(group, num_bytes)}
        for road in ROADS:
            figures[road] = _examine_road(road, num_bytes)
    hosts = {t["host"]: t["machine"] for t in told}
    routes = [(a, b, *told[a]["routes"][b]) for a in range(size) for b in range(a + 1, size)]
    dist.destroy_process_group(group)
    return {"rank": rank, "hosts": hosts, "routes": routes, "roads": figures}


def _examine_road(road: str, num_bytes: int) -> dict[str, float] | str:
    transports, attach = ROADS[road]
    try:
        with _variable("FS_COMM_ATTACH", attach):
            group = new_group(transports=transports, timeout_s=60)
        assert isinstance(group, SmFreeGroup)
        try:
            if group.road != road:
                return f"not for these ranks: {group.transport_reason.splitlines()[0]}"
            return measure(group, num_bytes)
        finally:
            dist.destroy_process_group(group)
    except CommError as error:
        return f"not for these ranks: {error}"


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def text(found: dict[str, Any]) -> str:
    """For people to read."""
    lines: list[str] = []
    for host, facts in found["hosts"].items():
        lines.append(host)
        for name, fact in facts.items():
            first, *more = fact if isinstance(fact, list) else [fact]
            lines.append(f"  {name:18} {first}")
            lines += [f"  {'':18} {line}" for line in more]
    lines.append("ranks and roads")
    lines += [f"  {a} and {b}: {road}: {reason}" for a, b, road, reason in found["routes"]]
    lines.append("measured: latency, AllToAll, AllGather")
    for road, figures in found["roads"].items():
        if isinstance(figures, str):
            lines.append(f"  {road:10} {figures}")
        else:
            lines.append(
                f"  {road:10} {figures['latency_us']:8.0f} µs  {figures['all_to_all_gb_per_s']:7.3f} GB/s  "
                f"{figures['all_gather_gb_per_s']:7.3f} GB/s{'  ' + figures['road'] if 'road' in figures else ''}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fs_comm.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="of a rank's output where bandwidth is measured")
    parser.add_argument("--json", action="store_true", help="one line for machines, in place of the text")
    options = parser.parse_args(arguments)
    if options.mib < 1:
        parser.error(f"--mib must be at least 1, got {options.mib}")
    try:
        is_forbidden("FS_COMM_ATTACH")
        VerbsConfig.from_environ()
    except ValueError as error:
        parser.error(str(error))
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # one of them alone is no job's
        again = ("-m", "fs_comm.doctor", *(sys.argv[1:] if arguments is None else arguments))
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        one_thread = {"OMP_NUM_THREADS": "1"} | os.environ
        return subprocess.run((*launch, *again), env=one_thread, check=False).returncode
    dist.init_process_group("gloo")
    found = examine_job(options.mib * MIB)
    if found.pop("rank") == 0:
        print(json.dumps(found) if options.json else text(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
