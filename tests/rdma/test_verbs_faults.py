"""What goes wrong on verbs is reported, with the peer's name and in limited time; what only looks wrong is not."""

import gc
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fs_comm.errors import CommError, CommTimeout, PeerLost
from fs_comm.transports.verbs import VerbsConfig, VerbsTransport, open_verbs
from fs_comm.transports.verbs_exchange import Flow, exchange
from fs_comm.transports.verbs_gid import read_gid_table
from fs_comm.transports.verbs_ports import list_ports
from tests.rdma.forks import run, run_outcomes
from tests.rdma.test_verbs_data import MIB, connect, gather_and_exchange, noise, uneven

# The adapter gives up after 8 × 0.13 s, so that a death shows soon enough for a test.
QUICK: dict[str, Any] = {"ack_timeout": 15, "heartbeat_s": 0.5}
NOTICE_S = 15.0  # retries, heartbeat, and a slow machine


def move_part(transport: VerbsTransport, peers: Iterable[int], sends: bool) -> None:
    """A few bytes at a time, so that a kill comes in the middle of many."""
    flows = [Flow(peer, torch.empty(4 * MIB, dtype=torch.uint8)) for peer in peers]
    exchange(transport, flows if sends else [], [] if sends else flows, timeout_s=60)


def lose_a_peer(rank: int, store: Any, bindings: list[str], victim_sends: bool) -> tuple[float, str]:
    """Rank 1 is killed while bytes go from it, or to it; the other ranks tell how long they did not know."""
    with connect(rank, store, 3, bindings, **QUICK) as transport:
        sends = (rank == 1) == victim_sends
        if rank == 1:
            store.set("pid", str(os.getpid()))
            while True:
                move_part(transport, transport.links, sends)
        move_part(transport, [1], sends)
        store.set(f"rank {rank} has moved some", "")
        store.wait(["rank 0 has moved some", "rank 2 has moved some"])
        began = time.monotonic()
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGKILL)
        lost = until_lost(lambda: move_part(transport, [1], sends))
        with pytest.raises(PeerLost):  # for good
            transport.progress()
        return time.monotonic() - began, lost


def until_lost(act: Callable[[], None]) -> str:
    """Do it again and again, until the peer is found lost: what was said then."""
    deadline = time.monotonic() + 2 * NOTICE_S
    while time.monotonic() < deadline:
        try:
            act()
        except PeerLost as lost:
            return str(lost)
    raise AssertionError("the loss of a peer was not noticed")


@pytest.mark.parametrize("victim_sends", [True, False], ids=["sender", "receiver"])
def test_a_peer_killed_mid_transfer_is_named_to_all_others(bindings: list[str], victim_sends: bool):
    outcomes = run_outcomes(lose_a_peer, 3, bindings, victim_sends, timeout_s=60)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].error
        seconds, text = outcomes[rank].value
        assert seconds < NOTICE_S
        assert text.startswith("rank 1 lost on verbs"), text


def lose_an_idle_peer(rank: int, store: Any, bindings: list[str]) -> str:
    with connect(rank, store, 2, bindings, **QUICK) as transport:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return until_lost(lambda: wait_and_progress(transport))


def wait_and_progress(transport: VerbsTransport) -> None:
    transport.wait(1)
    transport.progress()


def test_the_death_of_an_idle_peer_is_noticed_by_the_heartbeat(bindings: list[str]):
    outcomes = run_outcomes(lose_an_idle_peer, 2, bindings)
    assert "no acknowledgement" in outcomes[0].value


def stop_and_go_on(rank: int, store: Any, bindings: list[str]) -> None:
    """Rank 1 is stopped mid-transfer for longer than its adapter would be waited for."""
    size = 24 * MIB
    expected = noise(size, 7)
    with connect(rank, store, 2, bindings, **QUICK) as transport:
        if rank == 1:
            store.set("pid", str(os.getpid()))
            buffer = torch.empty(size, dtype=torch.uint8)
            exchange(transport, [], [Flow(0, buffer)], timeout_s=60)
            assert torch.equal(buffer, expected)
            return
        pid = int(store.get("pid"))
        exchange(transport, [Flow(1, expected[: size // 2])], [], timeout_s=60)
        os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + 4
        while time.monotonic() < until:
            transport.wait(0.5)
            transport.progress()
        os.kill(pid, signal.SIGCONT)
        exchange(transport, [Flow(1, expected[size // 2 :])], [], timeout_s=60)


def test_a_peer_that_is_stopped_for_a_while_is_not_lost(any_binding: list[str]):
    run(stop_and_go_on, 2, any_binding)


def say_and_part(rank: int, store: Any, bindings: list[str]) -> bool:
    with connect(rank, store, 2, bindings, **QUICK) as transport:
        (link,) = transport.links.values()
        if rank == 1:
            exchange(transport, [Flow(0, noise(3 * MIB, 8))], [], timeout_s=60)
            return True
        # Late, when the peer is long gone and heartbeats have failed.
        until = time.monotonic() + 4
        while time.monotonic() < until:
            transport.wait(0.5)
            transport.progress()
        buffer = torch.empty(3 * MIB, dtype=torch.uint8)
        exchange(transport, [], [Flow(1, buffer)], timeout_s=60)
        assert torch.equal(buffer, noise(3 * MIB, 8))
        return link.departed


def test_what_a_peer_sent_before_it_parted_can_be_read_after(any_binding: list[str]):
    assert run(say_and_part, 2, any_binding) == [True, True]


def part_in_the_middle(rank: int, store: Any, bindings: list[str]) -> list[str]:
    """Rank 1 sends half of what rank 0 expects, and leaves; rank 0 then has something to send."""
    with connect(rank, store, 2, bindings) as transport:
        if rank == 1:
            exchange(transport, [Flow(0, noise(MIB, 8))], [], timeout_s=60)
            return []
        with pytest.raises(PeerLost) as expecting:
            exchange(transport, [], [Flow(1, torch.empty(2 * MIB, dtype=torch.uint8))], timeout_s=60)
        with pytest.raises(PeerLost) as sending:
            exchange(transport, [Flow(1, torch.empty(1, dtype=torch.uint8))], [], timeout_s=60)
        return [str(expecting.value), str(sending.value)]


def test_a_peer_that_parts_in_the_middle_is_an_error_that_says_what_is_missing(any_binding: list[str]):
    expecting, sending = run(part_in_the_middle, 2, any_binding)[0]
    assert expecting == f"rank 1 has closed its end of the verbs link with {MIB} bytes not sent"
    assert sending.startswith("rank 1 has closed its end")


def ask_for_too_much(rank: int, store: Any, bindings: list[str]) -> str:
    with connect(rank, store, 2, bindings) as transport:
        text = ""
        if rank == 0:
            with pytest.raises(CommTimeout) as raised:
                exchange(transport, [], [Flow(1, torch.empty(77, dtype=torch.uint8))], timeout_s=2)
            text = str(raised.value)
            store.set("over", "")
        store.wait(["over"])
        return text


def test_a_peer_that_sends_nothing_is_a_timeout_that_says_what_was_waited_for(any_binding: list[str]):
    assert run(ask_for_too_much, 2, any_binding)[0] == "verbs: not done within 2 s: 77 bytes from rank 1"


def wrong_index(rank: int, store: Any, bindings: list[str]) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(CommError) as raised:
        connect(rank, store, 2, bindings, gid_index=[77, None])
    return str(raised.value), time.monotonic() - began


def test_a_gid_index_that_is_not_in_use_is_told_to_both_sides_at_once(any_binding: list[str]):
    (own, _), (peers, seconds) = run(wrong_index, 2, any_binding)
    assert "GID index 77 is not in use on this port; its table: 0: " in own
    assert peers.startswith("rank 0 cannot use verbs: GID index 77")
    assert seconds < 30


def wrong_address(rank: int, store: Any, bindings: list[str], ports: list[str], index: int) -> str:
    with pytest.raises(CommError) as raised:  # PeerLost, or already that no route to the address is found
        connect(rank, store, 2, bindings, device=ports, gid_index=[index, None], **QUICK)
    return str(raised.value)


STRAY = "172.31.255.1"


@pytest.fixture
def stray_gid(guest: None, two_ports: list[str]) -> Iterator[int]:
    """Index, on the first port, of an address that its interface has and that leads nowhere for everyone else."""
    port = next(p for p in list_ports() if str(p) == two_ports[0])
    netdev = read_gid_table(port)[0].netdev
    for command in (
        f"address add {STRAY}/32 dev {netdev}",
        "link add nowhere type dummy",
        "link set nowhere up",
        f"route add {STRAY} dev nowhere table 201",
        f"rule add pref 5 to {STRAY} lookup 201",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    until = time.monotonic() + 20
    while not (rows := [e.index for e in read_gid_table(port) if str(e.address.ipv4_mapped) == STRAY]):
        assert time.monotonic() < until, "the address did not come to the GID table"
        time.sleep(0.1)
    yield rows[0]
    for command in ("rule del pref 5", "link del nowhere", f"address del {STRAY}/32 dev {netdev}"):
        subprocess.run(["ip", *command.split()], check=True)


def test_a_gid_that_the_peer_cannot_reach_is_named_with_the_way_out(
    bindings: list[str], two_ports: list[str], stray_gid: int
):
    for text in run(wrong_address, 2, bindings, two_ports, stray_gid):
        assert f"GID {stray_gid} ({STRAY}, RoCE v2)" in text
        assert "FS_COMM_VERBS_GID_INDEX" in text


def wait_in_vain(rank: int, store: Any, bindings: list[str]) -> float:
    began = time.monotonic()
    with pytest.raises(CommTimeout, match="rank 1 did not give its address in time"):
        open_verbs(store, 0, [1], config=VerbsConfig(binding=bindings[0]), timeout_s=2)
    return time.monotonic() - began


def test_a_peer_that_never_comes_is_a_timeout_that_names_it(any_binding: list[str]):
    assert run(wait_in_vain, 1, any_binding)[0] < 20


def too_little_memory(rank: int, store: Any, bindings: list[str]) -> str:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    os.setuid(65534)  # root may lock as much as it likes
    with pytest.raises(CommError) as raised:
        open_verbs(dist.HashStore(), 0, [1], config=VerbsConfig(binding=bindings[0]), timeout_s=20)
    return str(raised.value)


def test_too_small_a_limit_of_locked_memory_is_named(bindings: list[str], guest: None):
    for node in Path("/dev/infiniband").iterdir():
        node.chmod(0o666)
    (text,) = run(too_little_memory, 1, bindings)
    assert "cannot register 16777216 bytes" in text
    assert "ulimit -l" in text


def open_and_close(rank: int, store: Any, bindings: list[str]) -> None:
    counts: list[int] = []
    for i in range(3):
        transport = connect(rank, dist.PrefixStore(str(i), store), 2, bindings)
        transport.close()
        transport.close()  # a second time is nothing
        with pytest.raises(CommError, match="closed"):
            transport.progress()
        del transport
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2], f"descriptors after each opening and closing: {counts}"


def test_closing_leaves_no_descriptor(bindings: list[str]):
    run(open_and_close, 2, bindings)


def fork_and_receive(rank: int, store: Any, bindings: list[str]) -> None:
    """Fork after registration, as data loader workers do, and write all over the slots in the child."""
    size = 12 * MIB
    with connect(rank, store, 2, bindings) as transport:
        (link,) = transport.links.values()
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            for slot in link._incoming:
                slot[:] = bytes(len(slot))  # the parent's write is what makes the kernel copy a shared page
            store.set("forked", "")
            buffer = torch.empty(size, dtype=torch.uint8)
            exchange(transport, [], [Flow(0, buffer)], timeout_s=60)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert torch.equal(buffer, noise(size, 9))
        else:
            store.wait(["forked"])
            exchange(transport, [Flow(1, noise(size, 9))], [], timeout_s=60)


def test_a_fork_after_registration_does_not_move_the_memory_away(bindings: list[str]):
    run(fork_and_receive, 2, bindings)


def leave_a_child(rank: int, store: Any, bindings: list[str]) -> str:
    """Rank 1 forks, as a data loader does, and is killed; its child lives on."""
    with connect(rank, store, 2, bindings, **QUICK) as transport:
        if rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            store.set("child", str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        child = int(store.get("child"))
        try:
            return until_lost(lambda: wait_and_progress(transport))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_outlives_a_rank_does_not_hide_its_death(bindings: list[str]):
    outcome = run_outcomes(leave_a_child, 2, bindings)[0]
    assert outcome.ok, outcome.error
    assert outcome.value.startswith("rank 1 lost on verbs")


def test_lost_packets_cost_time_and_no_bits(any_binding: list[str], two_ports: list[str], guest: None):
    netdev = read_gid_table(list_ports()[0])[0].netdev
    subprocess.run(["tc", "qdisc", "add", "dev", netdev, "root", "netem", "loss", "0.2%"], check=True)
    try:
        run(gather_and_exchange, 2, [uneven(2, 3 * MIB + 5)], any_binding, {"device": two_ports})
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", netdev, "root"], check=True)
