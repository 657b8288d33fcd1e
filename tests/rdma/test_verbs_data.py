"""What goes over verbs links arrives bit by bit as gloo brings it: both bindings, 2 and 4 ranks, uneven sizes."""

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fs_comm.transports.verbs import VerbsConfig, VerbsTransport, open_verbs
from fs_comm.transports.verbs_exchange import all_gather, all_to_all
from tests.rdma.forks import run

MIB = 1 << 20
KIB = 1 << 10


def connect(rank: int, store: Any, world_size: int, bindings: list[str], **config: Any) -> VerbsTransport:
    """All ranks to all, rank r by `bindings[r % …]`; the other settings may be lists too."""
    mine: dict[str, Any] = {k: v[rank % len(v)] if isinstance(v, list) else v for k, v in config.items()}
    return open_verbs(
        store,
        rank,
        [p for p in range(world_size) if p != rank],
        config=VerbsConfig(binding=bindings[rank % len(bindings)], **mine),
        local_rank=rank,
        timeout_s=60,
    )


def use_gloo(rank: int, store: Any, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("gloo", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=100),
    )


def noise(num_bytes: int, *seed: int) -> Tensor:
    """`(num_bytes,)` uint8 that repeats with no period a chunk could hide behind."""
    generator = torch.Generator().manual_seed(hash(seed))
    words = torch.randint(-(2**63), 2**63 - 1, (math.ceil(num_bytes / 8),), generator=generator)
    return words.view(torch.uint8)[:num_bytes]


Plan = tuple[list[int], list[list[int]]]
"""`sizes[r]` bytes of each rank r to be gathered, and `splits[r][p]` bytes of it to be sent to each p."""


def gather_and_exchange(rank: int, store: Any, plans: list[Plan], bindings: list[str], config: dict[str, Any]) -> None:
    """Each plan in turn over the same links, and every bit against gloo's."""
    world_size = len(plans[0][0])
    use_gloo(rank, store, world_size)
    with connect(rank, store, world_size, bindings, **config) as transport:
        for number, (sizes, splits) in enumerate(plans):
            own = noise(sizes[rank], number, rank)
            blocks = [own.clone() if r == rank else torch.empty(sizes[r], dtype=torch.uint8) for r in range(world_size)]
            inputs = [noise(splits[rank][p], number, rank, p) for p in range(world_size)]
            outputs = [torch.empty(splits[r][rank], dtype=torch.uint8) for r in range(world_size)]
            all_gather(transport, rank, blocks, timeout_s=100)
            all_to_all(transport, rank, outputs, inputs, timeout_s=100)
            for source in range(world_size):
                expected = own.clone() if source == rank else torch.empty(sizes[source], dtype=torch.uint8)
                dist.broadcast(expected, src=source)
                assert torch.equal(blocks[source], expected), f"block of rank {source} on rank {rank}"
            expected = torch.empty(sum(len(o) for o in outputs), dtype=torch.uint8)
            dist.all_to_all_single(expected, torch.cat(inputs), [len(o) for o in outputs], [len(i) for i in inputs])
            assert torch.equal(torch.cat(outputs), expected), f"exchange on rank {rank}"


def uneven(world_size: int, scale: int) -> Plan:
    """Sizes from nothing to `scale`, most of them a multiple of nothing."""
    sizes = [scale, 0, scale // 3 + 1, 1][:world_size]
    splits = [[(scale * (r + p) // world_size**2) | 1 for p in range(world_size)] for r in range(world_size)]
    splits[0][world_size - 1] = 0
    return sizes, splits


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_exchanges_bring_the_bits_that_gloo_brings(mixed_bindings: list[str], world_size: int):
    plans = [uneven(world_size, 100), uneven(world_size, 3 * MIB + 5), uneven(world_size, 0)]
    run(gather_and_exchange, world_size, plans, mixed_bindings, {})


@pytest.mark.parametrize("world_size", [2, 4])
def test_64_mib_a_rank_bring_the_bits_that_gloo_brings(bindings: list[str], world_size: int):
    sizes = [64 * MIB, 1, 5 * MIB + 3, 0][:world_size]
    splits: list[list[int]] = []
    for r in range(world_size):
        parts: list[int] = []
        for _ in range(world_size - 1):
            parts.append((64 * MIB - sum(parts)) // 3 + 7 * r)
        splits.append([*parts, 64 * MIB - sum(parts)])
    run(gather_and_exchange, world_size, [(sizes, splits)], bindings, {}, timeout_s=200)


def test_ends_with_other_slots_agree_on_the_smaller(any_binding: list[str]):
    config = {"slots": [4, 8], "slot_bytes": [64 * KIB, MIB]}
    run(gather_and_exchange, 2, [uneven(2, 3 * MIB + 5)], any_binding, config)


def test_two_devices_carry_one_exchange(bindings: list[str], two_ports: list[str]):
    run(gather_and_exchange, 4, [uneven(4, 3 * MIB + 5)], bindings, {"device": two_ports})


def see_ports(rank: int, store: Any, bindings: list[str]) -> tuple[str, str]:
    with connect(rank, store, 2, bindings) as transport:
        (link,) = transport.links.values()
        return link.mine.port, link.peers.port


def test_ranks_of_one_host_take_its_ports_in_turn(any_binding: list[str], two_ports: list[str]):
    first, second = two_ports
    assert run(see_ports, 2, any_binding) == [(first, second), (second, first)]


def look_at_messages(rank: int, store: Any, bindings: list[str]) -> int:
    with connect(rank, store, 2, bindings, slot_bytes=64 * MIB, slots=2) as transport:
        (link,) = transport.links.values()
        most = transport._device.port(1).max_message_bytes
        assert link.slot_bytes == min(most, 64 * MIB)
        return link.slot_bytes


def test_no_message_is_larger_than_the_port_allows(bindings: list[str]):
    a, b = run(look_at_messages, 2, bindings)
    assert a == b


def fill_until_refused(rank: int, store: Any, bindings: list[str]) -> int:
    """Rank 0 sends until it may not; rank 1 reads nothing until rank 0 is stuck, then everything, in order."""
    with connect(rank, store, 2, bindings, slots=5, slot_bytes=4096) as transport:
        (link,) = transport.links.values()
        for first in (0, 5):
            if rank == 0:
                for i in range(first, first + 5):
                    while (slot := link.acquire()) is None:
                        transport.wait(1)
                        transport.progress()
                    slot[:4] = i.to_bytes(4)
                    link.post(4)
                transport.progress()
                assert link.acquire() is None, "five slots are filled, a sixth would overwrite one"
                store.set(f"stuck {first}", "")
            else:
                store.wait([f"stuck {first}"])
                for i in range(first, first + 5):
                    while (message := link.arrived()) is None:
                        transport.wait(1)
                        transport.progress()
                    assert int.from_bytes(message) == i
                for _ in range(5):
                    link.release()
        return 10


def test_a_sender_stops_when_the_receivers_slots_are_full_and_goes_on_when_they_are_read(bindings: list[str]):
    assert run(fill_until_refused, 2, bindings) == [10, 10]
