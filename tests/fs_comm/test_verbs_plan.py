"""The parts of the verbs transport that need no device: ports, GIDs, schedules, credits, endpoints, bindings."""

import dataclasses
import subprocess
import sys
from collections import deque
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fs_comm.transports import verbs_binding
from fs_comm.transports.verbs import VerbsConfig, probe_verbs
from fs_comm.transports.verbs_binding import NoBinding, Region, load_binding
from fs_comm.transports.verbs_credit import (
    BYE,
    CREDIT,
    DATA,
    HELLO,
    NUMBER_MASK,
    ReceiveSlots,
    SendCredits,
    SendQueue,
    pack_immediate,
    unpack_immediate,
)
from fs_comm.transports.verbs_endpoint import Endpoint, path_between, slot_plan
from fs_comm.transports.verbs_gid import GidEntry, choose_gid, read_gid_table, wanted_gid_index
from fs_comm.transports.verbs_link import VerbsLink
from fs_comm.transports.verbs_ports import choose_port, list_ports
from fs_comm.transports.verbs_schedule import pairwise_all_to_all, ring_all_gather

# Rows of a real adapter's table, in the order that its kernel gave: v1 and v2 of each address.
LINK_LOCAL_V1 = GidEntry(0, IPv6Address("fe80::84df:8fff:fe7e:fd79"), "IB/RoCE v1", "eth0")
LINK_LOCAL_V2 = GidEntry(1, IPv6Address("fe80::84df:8fff:fe7e:fd79"), "RoCE v2", "eth0")
IPV4_V1 = GidEntry(2, IPv6Address("::ffff:10.77.0.1"), "IB/RoCE v1", "eth0")
IPV4_V2 = GidEntry(3, IPv6Address("::ffff:10.77.0.1"), "RoCE v2", "eth0")
IPV6_V2 = GidEntry(4, IPv6Address("fd00::7"), "RoCE v2", "eth0")
AUTO_IPV4_V2 = GidEntry(5, IPv6Address("::ffff:169.254.3.4"), "RoCE v2", "eth0")
TABLE = [LINK_LOCAL_V1, LINK_LOCAL_V2, IPV4_V1, IPV4_V2, IPV6_V2, AUTO_IPV4_V2]


@pytest.mark.parametrize(
    ("table", "best"),
    [
        (TABLE, IPV4_V2),
        ([LINK_LOCAL_V2, IPV6_V2, IPV4_V1], IPV6_V2),
        ([LINK_LOCAL_V2, IPV4_V1], IPV4_V1),
        ([AUTO_IPV4_V2, IPV6_V2], IPV6_V2),
    ],
)
def test_the_gid_is_roce_v2_before_v1_and_ipv4_before_ipv6(table: list[GidEntry], best: GidEntry):
    assert choose_gid(table, link_layer="Ethernet") == best


@given(st.permutations(TABLE))
def test_the_choice_of_a_gid_does_not_depend_on_the_order_of_the_table(table: list[GidEntry]):
    assert choose_gid(table, link_layer="Ethernet") == IPV4_V2


@pytest.mark.parametrize("table", [[], [LINK_LOCAL_V1, LINK_LOCAL_V2], [AUTO_IPV4_V2]])
def test_a_table_without_a_reachable_gid_is_an_error_that_shows_it(table: list[GidEntry]):
    with pytest.raises(ValueError, match=r"FS_COMM_VERBS_GID_INDEX.*table: ") as raised:
        choose_gid(table, link_layer="Ethernet")
    assert all(str(entry) in str(raised.value) for entry in table)


def test_a_wanted_gid_is_taken_even_where_it_is_not_the_best():
    assert choose_gid(TABLE, link_layer="Ethernet", index=1) == LINK_LOCAL_V2


def test_a_wanted_gid_that_is_not_in_use_is_an_error_that_shows_the_table():
    with pytest.raises(ValueError, match=r"index 9 is not in use.*3: 10\.77\.0\.1 \(RoCE v2, eth0\)"):
        choose_gid(TABLE, link_layer="Ethernet", index=9)


def test_infiniband_uses_the_ports_own_gid():
    own = GidEntry(0, IPv6Address("fe80::1:2:3:4"), "IB/RoCE v1", "")
    assert choose_gid([own], link_layer="InfiniBand") == own


@pytest.mark.parametrize("text", ["one", "-1", "1.0", " 1"])
def test_a_gid_index_in_the_environment_must_be_a_number(text: str):
    with pytest.raises(ValueError, match="FS_COMM_VERBS_GID_INDEX must be the index"):
        wanted_gid_index({"FS_COMM_VERBS_GID_INDEX": text})


def test_a_gid_index_in_the_environment_counts_where_it_is_set():
    assert wanted_gid_index({"FS_COMM_VERBS_GID_INDEX": "3"}) == 3
    assert wanted_gid_index({}) is None


def make_device(sysfs: Path, name: str, *, state: str = "4: ACTIVE", node_type: str = "1: CA", gids: int = 0) -> None:
    port = sysfs / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "gid_attrs" / "ndevs").mkdir(parents=True)
    (sysfs / name / "node_type").write_text(f"{node_type}\n")
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text("Ethernet\n")
    for i in range(gids):
        (port / "gids" / str(i)).write_text(f"0000:0000:0000:0000:0000:ffff:0a4d:{i + 1:04x}\n")
        (port / "gid_attrs" / "types" / str(i)).write_text("RoCE v2\n")
        (port / "gid_attrs" / "ndevs" / str(i)).write_text("eth0\n")
    # The kernel shows unused rows as zeros, and refuses to read their type.
    (port / "gids" / str(gids)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")


def make_uverbs(folder: Path) -> Path:
    folder.mkdir()
    (folder / "uverbs0").touch()
    return folder


def test_ports_are_listed_with_the_reason_why_one_is_unusable(tmp_path: Path):
    sysfs = tmp_path / "sysfs"
    make_device(sysfs, "mlx5_0")
    make_device(sysfs, "mlx5_1", state="1: DOWN")
    make_device(sysfs, "siw0", node_type="4: RNIC")
    ports = list_ports(sysfs, make_uverbs(tmp_path / "dev"))
    assert [str(p) for p in ports] == ["mlx5_0:1", "mlx5_1:1", "siw0:1"]
    assert ports[0].unusable is None
    assert "DOWN" in (ports[1].unusable or "")
    assert "RNIC" in (ports[2].unusable or "")


def test_a_device_without_uverbs_is_named_as_such(tmp_path: Path):
    make_device(tmp_path / "sysfs", "mlx5_0")
    ports = list_ports(tmp_path / "sysfs", tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"uverbs\* is missing.*container"):
        choose_port(ports)


def test_a_machine_without_rdma_has_no_ports(tmp_path: Path):
    assert list_ports(tmp_path / "absent") == []
    with pytest.raises(ValueError, match="this machine has: none"):
        choose_port([])


def test_ports_are_dealt_out_by_local_rank_and_a_wanted_one_is_obeyed(tmp_path: Path):
    for name in ("a", "b"):
        make_device(tmp_path / "sysfs", name)
    ports = list_ports(tmp_path / "sysfs", make_uverbs(tmp_path / "dev"))
    assert [choose_port(ports, local_rank=r).device for r in range(4)] == ["a", "b", "a", "b"]
    assert choose_port(ports, local_rank=0, wanted="b").device == "b"
    assert choose_port(ports, local_rank=1, wanted="a:1").device == "a"
    with pytest.raises(ValueError, match=r"'c'.*a:1 \(usable\); b:1 \(usable\)"):
        choose_port(ports, wanted="c")


def test_the_gid_table_holds_the_rows_in_use(tmp_path: Path):
    make_device(tmp_path, "mlx5_0", gids=12)
    port = list_ports(tmp_path, tmp_path)[0]
    table = read_gid_table(port, tmp_path)
    assert [e.index for e in table] == list(range(12)), "row 10 comes after row 9, and the empty row 12 not at all"
    assert str(table[1]) == "1: 10.77.0.2 (RoCE v2, eth0)"


world_sizes = st.integers(1, 9)


@given(world_sizes)
def test_the_ring_brings_every_block_to_every_rank(world_size: int):
    has = [{rank} for rank in range(world_size)]
    plans = [ring_all_gather(rank, world_size) for rank in range(world_size)]
    for k in range(world_size - 1):
        arriving: list[set[int]] = [set() for _ in range(world_size)]
        for rank in range(world_size):
            step = plans[rank][k]
            assert step.send_block in has[rank], "a rank may only send what it has by then"
            assert plans[step.send_to][k].receive_from == rank
            assert plans[step.send_to][k].receive_block == step.send_block
            arriving[step.send_to].add(step.send_block)
        for rank in range(world_size):
            assert not arriving[rank] & has[rank], "no block is sent to who has it"
            has[rank] |= arriving[rank]
    assert all(blocks == set(range(world_size)) for blocks in has)


@given(world_sizes)
def test_pairwise_rounds_are_permutations_that_cover_every_pair_once(world_size: int):
    plans = [pairwise_all_to_all(rank, world_size) for rank in range(world_size)]
    pairs: set[tuple[int, int]] = set()
    for k in range(world_size - 1):
        targets = [plans[rank][k].send_to for rank in range(world_size)]
        assert sorted(targets) == list(range(world_size)), "nobody receives twice in a round"
        for rank, to in enumerate(targets):
            assert plans[to][k].receive_from == rank
            assert (plans[rank][k].send_block, plans[to][k].receive_block) == (to, rank)
            pairs.add((rank, to))
    assert len(pairs) == world_size * (world_size - 1)


def test_a_schedule_is_refused_for_a_rank_outside_the_world():
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3 for 4 ranks, got 4"):
        ring_all_gather(4, 4)


@given(st.sampled_from([DATA, CREDIT]), st.integers(0, 2**33))
def test_an_immediate_keeps_its_kind_and_its_number_modulo_2_to_30(kind: int, number: int):
    packed = pack_immediate(kind, number)
    assert 0 <= packed < 2**32
    assert unpack_immediate(packed) == (kind, number % 2**30)


@given(
    st.integers(2, 9),
    st.lists(st.sampled_from(["send", "deliver", "read", "release", "credit"]), min_size=40, max_size=200),
)
def test_credits_never_overrun_a_slot_and_never_run_dry(slots: int, moves: list[str]):
    """A sender and a receiver under any interleaving of their moves, then left to run until nothing can."""
    sender, receiver = SendCredits(slots), ReceiveSlots(slots)
    wire: deque[int] = deque()
    credits: deque[int] = deque()
    contents: dict[int, int] = {}  # slot -> the message in it, from sending until release
    held: deque[int] = deque()
    sent = read = 0

    def move(name: str) -> bool:
        nonlocal sent, read
        if name == "send" and (number := sender.take()) is not None:
            assert number == sent
            assert number % slots not in contents, "the slot is still in use"
            contents[number % slots] = number
            wire.append(number)
            sent += 1
        elif name == "deliver" and wire:
            number = wire.popleft()
            receiver.land(number, number * 10)
        elif name == "read" and (found := receiver.read()) is not None:
            slot, num_bytes = found
            assert contents[slot] * 10 == num_bytes == read * 10
            held.append(slot)
            read += 1
        elif name == "release" and held:
            del contents[held.popleft()]
            receiver.release()
            if (total := receiver.credit_due()) is not None:
                receiver.credit_told(total)
                credits.append(total)
        elif name == "credit" and credits:
            sender.peer_has_released(credits.popleft())
        else:
            return False
        return True

    for name in moves:
        move(name)
    while any([move(name) for name in ("deliver", "read", "release", "credit")]):
        pass
    assert sender.available > 0, "the receiver has emptied everything, so the sender must be able to go on"


def test_credit_counts_go_on_past_the_wrap_of_their_thirty_bits():
    sender, receiver = SendCredits(4), ReceiveSlots(4)
    start = NUMBER_MASK - 5
    sender._taken = sender._returned = start
    receiver._landed = receiver._read = receiver._released = receiver._told = start
    for _ in range(40):
        number = sender.take()
        assert number is not None
        receiver.land(number & NUMBER_MASK, 1)
        assert receiver.read() == (number % 4, 1)
        receiver.release()
        total = receiver.credit_due()
        assert total is not None
        receiver.credit_told(total)
        sender.peer_has_released(total & NUMBER_MASK)
    assert sender.available == 4


def test_a_broken_account_is_an_error_and_not_wrong_data():
    receiver = ReceiveSlots(2)
    with pytest.raises(ValueError, match="message 0 is next, got 1"):
        receiver.land(1, 10)
    receiver.land(0, 10)
    receiver.land(1, 10)
    with pytest.raises(ValueError, match="without a credit"):
        receiver.land(2, 10)
    with pytest.raises(ValueError, match="needs a message that was read"):
        receiver.release()
    with pytest.raises(ValueError, match="released 1 slots where 0 are in use"):
        SendCredits(2).peer_has_released(1)


@given(st.integers(1, 12), st.lists(st.sampled_from([False, False, False, True]), min_size=60, max_size=300))
def test_a_full_send_queue_always_holds_a_signalled_request(depth: int, posts: list[bool]):
    """Or nothing would ever tell that it has room again."""
    queue = SendQueue(depth)
    outstanding: list[tuple[int, bool]] = []
    for wants_signal in posts:
        if not queue.room:
            assert any(signalled for _, signalled in outstanding)
            done = next(i for i, (_, signalled) in enumerate(outstanding) if signalled)
            queue.complete(outstanding[done][0])
            del outstanding[: done + 1]
        outstanding.append(queue.post(signal=wants_signal))
        assert queue.room == depth - len(outstanding)
    assert queue.idle == (not outstanding)


def test_posting_to_a_full_send_queue_is_refused():
    queue = SendQueue(1)
    queue.post()
    with pytest.raises(ValueError, match="the send queue is full: 1 requests"):
        queue.post()


ENDPOINT = Endpoint(
    port="mlx5_0:1",
    gid="::ffff:10.77.0.1",
    gid_index=3,
    gid_kind="RoCE v2",
    link_layer="Ethernet",
    lid=0,
    mtu=5,
    queue_pair=17,
    packet_number=5,
    address=2**47,
    key=2**32 - 1,
    slots=8,
    slot_bytes=1 << 20,
)


def test_an_endpoint_survives_its_text():
    assert Endpoint.from_json(ENDPOINT.to_json()) == ENDPOINT


def test_an_endpoint_of_another_protocol_is_refused():
    with pytest.raises(ValueError, match=r"must speak version 1.*got 2"):
        Endpoint.from_json(dataclasses.replace(ENDPOINT, protocol=2).to_json())


def test_a_path_takes_the_smaller_mtu_and_the_peers_numbers():
    peers = dataclasses.replace(ENDPOINT, mtu=3, queue_pair=18, packet_number=6, gid="fd00::7")
    path = path_between(ENDPOINT, peers, port=1, ack_timeout=17, retries=7)
    assert (path.mtu, path.peer_queue_pair, path.peer_packet_number, path.packet_number) == (3, 18, 6, 5)
    assert path.peer_gid == IPv6Address("fd00::7").packed
    assert path.gid_index == 3
    assert path.routed


@pytest.mark.parametrize(("field", "value"), [("gid_kind", "IB/RoCE v1"), ("link_layer", "InfiniBand")])
def test_ends_that_cannot_speak_are_refused_by_name(field: str, value: str):
    with pytest.raises(ValueError, match=f"same {field}.*RoCE v2.*{value}"):
        path_between(ENDPOINT, dataclasses.replace(ENDPOINT, **{field: value}), port=1, ack_timeout=17, retries=7)


@given(st.integers(1, 2000), st.integers(12, 23))
def test_a_slot_plan_fits_its_budget_and_the_adapter(num_peers: int, max_message_log2: int):
    budget = 1 << 30
    slots, slot_bytes = slot_plan(
        num_peers, budget_bytes=budget, max_message_bytes=1 << max_message_log2, slots=8, slot_bytes=1 << 20
    )
    assert 2 * num_peers * slots * slot_bytes <= budget
    assert slot_bytes <= 1 << max_message_log2
    assert slots >= 2
    if num_peers <= 64:
        assert (slots, slot_bytes) == (8, min(1 << 20, 1 << max_message_log2)), "nothing is cut while there is room"


def test_a_budget_that_cannot_hold_two_slots_a_peer_is_refused():
    with pytest.raises(ValueError, match="staging_bytes allows 1048576: raise it"):
        slot_plan(1000, budget_bytes=1 << 20, max_message_bytes=1 << 23, slots=8, slot_bytes=1 << 20)


def test_importing_the_transport_imports_no_binding():
    code = "import sys, fs_comm.transports.verbs; sys.exit(any(m in sys.modules for m in ('ibverbs', 'pyverbs')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ibverbs", "pyverbs"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"fs_comm.transports.verbs_{name}", raising=False)


def test_a_missing_binding_is_an_error_that_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    without_bindings(monkeypatch)
    with pytest.raises(NoBinding, match=r"ibverbs: .*pyverbs: .*`pip install ibverbs`.*python3-pyverbs"):
        load_binding()
    with pytest.raises(NoBinding, match=r"libibverbs: pyverbs: "):
        load_binding("pyverbs")


def test_an_unknown_binding_is_refused():
    with pytest.raises(ValueError, match=r"one of \('ibverbs', 'pyverbs'\), got 'rdma'"):
        load_binding("rdma")  # pyright: ignore[reportArgumentType]


def test_a_machine_without_rdma_is_not_available_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fs_comm.transports.verbs.list_ports", list)
    found = probe_verbs(VerbsConfig())
    assert (found.ok, found.reason) == (False, "the kernel lists no RDMA device in /sys/class/infiniband")


def test_a_machine_without_a_binding_is_not_available_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    without_bindings(monkeypatch)
    make_device(tmp_path / "sysfs", "mlx5_0", gids=1)
    ports = list_ports(tmp_path / "sysfs", make_uverbs(tmp_path / "dev"))
    monkeypatch.setattr("fs_comm.transports.verbs.list_ports", lambda: ports)
    monkeypatch.setattr(
        "fs_comm.transports.verbs.read_gid_table", lambda port: read_gid_table(port, tmp_path / "sysfs")
    )
    found = probe_verbs(VerbsConfig())
    assert not found.ok
    assert "pip install ibverbs" in found.reason


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("slots", 1, "at least 2"),
        ("slot_bytes", 100_000, "power of two"),
        ("ack_timeout", 0, "wait for ever"),
        ("retries", 7, "for ever to software RoCE"),
        ("heartbeat_s", 0.0, "above 0"),
        ("lost_after_s", 0.5, "below lost_after_s"),
    ],
)
def test_a_configuration_that_could_hang_or_fail_later_is_refused(field: str, value: float, text: str):
    with pytest.raises(ValueError, match=text):
        VerbsConfig(**{field: value})  # pyright: ignore[reportArgumentType]


def test_the_environment_names_port_and_gid():
    config = VerbsConfig.from_environ({"FS_COMM_VERBS_DEVICE": "mlx5_2:1", "FS_COMM_VERBS_GID_INDEX": "3"})
    assert (config.device, config.gid_index) == ("mlx5_2:1", 3)
    assert VerbsConfig.from_environ({}) == VerbsConfig()


class SilentPair:
    """A queue pair whose peer never acknowledges."""

    number = 1

    def connect(self, path: verbs_binding.Path) -> None: ...
    def post_receives(self, count: int) -> None: ...
    def close(self) -> None: ...

    def write(self, address: int, local_key: int, peer_address: int, peer_key: int) -> "SilentPair":
        return self

    def post(self, num_bytes: int, immediate: int | None, request: int, signalled: bool) -> None: ...


def test_a_greeting_is_over_once_the_peer_has_greeted_and_parted():
    """Its last acknowledgement may be lost with it: the group's opening waited for that one until its time was up."""
    memory = memoryview(bytearray(ENDPOINT.slots * ENDPOINT.slot_bytes))
    link = VerbsLink(
        1,
        SilentPair(),
        ENDPOINT,
        ENDPOINT,
        region=Region(0, 0),
        outgoing=memory,
        outgoing_address=0,
        incoming=memory,
        name="rank 1",
    )
    link.greet()
    assert not link.acquainted
    link.on_message(pack_immediate(HELLO, 0), 0)
    assert not link.acquainted  # ours may not have come
    link.on_message(pack_immediate(BYE, 0), 0)
    assert link.acquainted
