"""How fast links are against perftest's `ib_write_bw` on the same device: `python -m tests.rdma.measure`.

Pairs in turn, one way, messages of 1 MiB; medians. What is measured in a guest with an emulated processor says how
much the Python around the writes costs *there*; it says nothing about a network.
"""

import argparse
import re
import statistics
import subprocess
import time
from typing import Any

import torch

from fs_comm.transports.verbs import VerbsConfig, open_verbs
from fs_comm.transports.verbs_exchange import Flow, exchange
from fs_comm.transports.verbs_gid import choose_gid, read_gid_table
from fs_comm.transports.verbs_ports import choose_port, list_ports
from tests.rdma.forks import run

MIB = 1 << 20


def one_way(rank: int, store: Any, binding: str, size: int) -> float:
    """MB/s from rank 0 to rank 1, of the second transfer."""
    with open_verbs(store, rank, [1 - rank], config=VerbsConfig(binding=binding), timeout_s=60) as transport:
        buffer = torch.zeros(size, dtype=torch.uint8)
        for warm_up in (True, False):
            store.set(f"{rank} {warm_up}", "")
            store.wait([f"{1 - rank} {warm_up}"])
            began = time.perf_counter()
            flow = Flow(1 - rank, buffer)
            exchange(transport, [flow] if rank == 0 else [], [flow] if rank == 1 else [], timeout_s=60)
        return size / (time.perf_counter() - began) / 1e6


def perftest(size: int) -> float:
    """MB/s of ib_write_bw on the device and GID that a link would take."""
    port = choose_port(list_ports())
    gid = choose_gid(read_gid_table(port), link_layer=port.link_layer)
    command = (
        f"ib_write_bw -d {port.device} -i {port.number} -x {gid.index} -s {MIB} -n {size // MIB} -Q 1 -t 8".split()
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        time.sleep(2)
        out = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, check=True).stdout
        server.wait(30)
    row = re.search(rf"^ {MIB}\s+\d+\s+([\d.]+)\s+([\d.]+)", out, re.MULTILINE)
    assert row, out
    return float(row[2]) * MIB / 1e6  # its MB are MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"ib_write_bw": [], "ibverbs": [], "pyverbs": []}
    for _ in range(options.rounds):
        found["ib_write_bw"].append(perftest(options.mib * MIB))
        for binding in ("ibverbs", "pyverbs"):
            found[binding].append(run(one_way, 2, binding, options.mib * MIB)[1])
    for name, rates in found.items():
        ratios = [rate / base for rate, base in zip(rates, found["ib_write_bw"], strict=True)]
        print(
            f"{name:12} {statistics.median(rates):8.0f} MB/s ({min(rates):.0f}-{max(rates):.0f})  "
            f"{statistics.median(ratios):.2f} of ib_write_bw ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
