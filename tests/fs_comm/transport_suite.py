"""What a group must do whichever transports join its ranks: each case takes a group, and compares bits with gloo's.

Run by every rank of a default group over gloo, whose ranks are those of the group under test.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import fs_comm

MIB = 1 << 20
DTYPES = [
    torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint8
]  # fmt: skip
Group = fs_comm.SmFreeGroup


def noise(*shape: int, dtype: torch.dtype = torch.uint8, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 120, shape, generator=generator).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor]) -> None:
    one, other = (torch.cat([bits(t) for t in ([x] if isinstance(x, Tensor) else x)]) for x in (found, expected))
    assert torch.equal(one, other)


def gloo_all_to_all(mine: Tensor, sizes_in: list[int], sizes_out: list[int]) -> Tensor:
    """gloo moves bytes, since it knows fewer dtypes than we do."""
    row = math.prod(mine.shape[1:]) * mine.element_size()
    out = torch.empty(sum(sizes_in) * row, dtype=torch.uint8)
    dist.all_to_all_single(out, bits(mine), [n * row for n in sizes_in], [n * row for n in sizes_out])
    return out


def gloo_all_gather(mine: Tensor) -> list[Tensor]:
    outs = [torch.empty_like(bits(mine)) for _ in range(dist.get_world_size())]
    dist.all_gather(outs, bits(mine))
    return outs


def splits(size: int, scale: int, salt: int) -> list[list[int]]:
    """Rows that rank r sends to p: uneven, some nothing, up to 4 `scale`."""
    rows = [[(r * 7 + p * 3 + salt) % 5 * scale for p in range(size)] for r in range(size)]
    rows[0][size - 1] = 0
    return rows


def every_dtype_with_uneven_splits(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for n, dtype in enumerate(DTYPES):
        rows = splits(size, (1, 2000)[n % 2], n)
        to_me = [rows[r][rank] for r in range(size)]
        mine = noise(sum(rows[rank]), 3, dtype=dtype, seed=rank)
        expected = gloo_all_to_all(mine, to_me, rows[rank])
        single = torch.empty(sum(to_me), 3, dtype=dtype)
        dist.all_to_all_single(single, mine, to_me, rows[rank], group=group)
        same_bits(single, expected)
        parts = [torch.empty(k, 3, dtype=dtype) for k in to_me]
        dist.all_to_all(parts, list(mine.split(rows[rank])), group=group)
        same_bits(parts, expected)
        block = noise(5000, dtype=dtype, seed=100 + rank)
        gathered = [torch.empty_like(block) for _ in range(size)]
        dist.all_gather(gathered, block, group=group)
        same_bits(gathered, gloo_all_gather(block))


def every_spelling(group: Group) -> None:
    rank, size = group.rank(), group.size()
    with warnings.catch_warnings():  # some spellings are deprecated by newer versions of torch
        warnings.simplefilter("ignore")
        for length in (4 * size, 20_000 * size):  # with the headers, and by the road
            x = noise(length, dtype=torch.float32, seed=rank)
            blocks, y = gloo_all_gather(x), 2 * x
            twice = gloo_all_gather(y)
            out = torch.empty(size * length)
            dist.all_gather_into_tensor(out, x, group=group)
            same_bits(out, blocks)
            out = torch.empty(size, length)
            work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
            assert work is not None
            assert work.wait()
            same_bits(out, blocks)
            outs = [torch.empty(size * length) for _ in range(2)]
            with dist._coalescing_manager(group=group, async_ops=True) as manager:  # pyright: ignore
                for o, i in zip(outs, (x, y), strict=True):
                    dist.all_gather_into_tensor(o, i, group=group)
            manager.wait()
            same_bits(outs, [*blocks, *twice])
            lists = [[torch.empty(length), torch.empty(length)] for _ in range(size)]
            dist.all_gather_coalesced(lists, [x, y], group=group)  # pyright: ignore
            same_bits([pair[k] for k in range(2) for pair in lists], [*blocks, *twice])
            same_bits(functional.all_gather_tensor(x, 0, group) + 0, blocks)
            several = functional.all_gather_into_tensor_coalesced([x, y], group)
            same_bits([t + 0 for t in several], [*blocks, *twice])

            even = gloo_all_to_all(x, [length // size] * size, [length // size] * size)
            same_bits(functional.all_to_all_single(x, None, None, group) + 0, even)
            to_all = [length - (size - 1) * (length // size // 2), *[length // size // 2] * (size - 1)]
            to_me = [to_all[rank]] * size
            leaf = x.clone().requires_grad_()
            uneven = functional.all_to_all_single_autograd(leaf, to_me, to_all, group)
            same_bits(uneven.detach() + 0, gloo_all_to_all(x, to_me, to_all))
            (3 * uneven).sum().backward()
            assert leaf.grad is not None
            assert (leaf.grad == 3).all()
        things: list[Any] = [None] * size
        dist.all_gather_object(things, {"rank": rank}, group=group)
        assert things == [{"rank": r} for r in range(size)]
        uneven_blocks = [torch.empty(10_000 * r) for r in range(size)]  # gloo cannot
        dist.all_gather(uneven_blocks, torch.full((10_000 * rank,), float(rank)), group=group)
        assert all((t == r).all() for r, t in enumerate(uneven_blocks))
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(range(size))
        dist.barrier(group)


def strided_and_empty_tensors(group: Group) -> None:
    rank, size = group.rank(), group.size()
    for rows in (4, 6000):
        strided = torch.arange(2 * rows * size).view(-1, 2)[:, 0]
        out = torch.full((rows * size, 2), -1)
        dist.all_to_all_single(out[:, 1], strided, group=group)
        assert (out[:, 0] == -1).all()
        assert torch.equal(out[:, 1], strided.view(size, -1)[rank].repeat(size))
        wide = torch.full((rows, 2 * size), -1)
        dist.all_gather([wide[:, 2 * r] for r in range(size)], strided[:rows] + rank, group=group)
        assert torch.equal(wide[:, ::2], strided[:rows, None] + torch.arange(size))
        assert (wide[:, 1::2] == -1).all()
    nothing = torch.empty(0, 7)
    dist.all_to_all_single(nothing, nothing.clone(), [0] * size, [0] * size, group=group)
    dist.all_gather([torch.empty(0) for _ in range(size)], torch.empty(0), group=group)
    only_last = [0] * (size - 1) + [300_000]  # all to the last rank, nothing to the others
    to_me = [300_000] * size if rank == size - 1 else [0] * size
    out = torch.empty(sum(to_me))
    dist.all_to_all_single(out, torch.full((300_000,), float(rank)), to_me, only_last, group=group)
    assert torch.equal(out, torch.arange(float(size)).repeat_interleave(torch.tensor(to_me)))


def many_at_once(group: Group) -> None:
    size = group.size()
    outs = [torch.empty(size * (100 if k % 8 else 30_000)) for k in range(64)]
    works = [
        dist.all_to_all_single(o, torch.full_like(o, float(k)), group=group, async_op=True) for k, o in enumerate(outs)
    ]
    assert all(w is not None and w.wait() for w in reversed(works))
    assert all(w is not None and w.is_completed() and w.exception() is None for w in works)
    assert all((o == k).all() for k, o in enumerate(outs))
    assert works[0] is not None
    assert works[0].get_future().wait()[0] is outs[0]


def large_parts(group: Group, num_bytes: int = 64 * MIB) -> None:
    """`num_bytes` a rank, in parts that are multiples of nothing."""
    rank, size = group.rank(), group.size()
    first = [num_bytes // (p + 2) + 7 * r for r in range(size) for p in range(size - 1)]
    rows = [first[r * (size - 1) : (r + 1) * (size - 1)] for r in range(size)]
    rows = [[*parts, max(0, num_bytes - sum(parts))] for parts in rows]
    mine = noise(sum(rows[rank]), seed=rank)
    to_me = [rows[r][rank] for r in range(size)]
    out = torch.empty(sum(to_me), dtype=torch.uint8)
    dist.all_to_all_single(out, mine, to_me, rows[rank], group=group)
    same_bits(out, gloo_all_to_all(mine, to_me, rows[rank]))
    block = mine[: num_bytes // size - 3]
    gathered = [torch.empty_like(block) for _ in range(size)]
    dist.all_gather(gathered, block, group=group)
    same_bits(gathered, gloo_all_gather(block))


CASES: list[Callable[[Group], None]] = [
    every_dtype_with_uneven_splits,
    every_spelling,
    strided_and_empty_tensors,
    many_at_once,
    large_parts,
]
