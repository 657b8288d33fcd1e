"""The reference of `ranged_dispatch` and `ranged_combine`: where every word lies in the buffer and in its column.

Legend: R ranks, C columns, F keys of all columns, B samples of the batch, n samples that are exchanged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fs_kernels._words import as_words, narrowest_word, value_bytes
from fs_kernels.jagged_permute import offsets_of, source_places

ALIGNMENT = 16  # bytes: what sections begin at multiples of


def buffer_dtype(values: Sequence[Tensor]) -> torch.dtype:
    """The dtype of the columns where they agree, else uint8."""
    dtypes = {v.dtype for v in values}
    return dtypes.pop() if len(dtypes) == 1 else torch.uint8


@dataclass(frozen=True)
class _Plan:
    """Where everything goes, in torch."""

    offsets: Tensor
    """`(F, B + 1)`: where each sample's values lie in its column."""
    ends: Tensor
    """`(F, n + 1)`: the same for the exchanged samples, were they packed without gaps."""
    cuts: Tensor
    """`(R, F)`: the byte of the buffer where each key's values begin."""
    num_bytes: Tensor
    """`()`: of the buffer."""


def _plan(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    num_keys: Sequence[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
) -> _Plan:
    sizes = [value_bytes(v) for v, k in zip(values, num_keys, strict=True) for _ in range(k)]
    width = torch.tensor(sizes, dtype=torch.int64, device=bounds.device)
    table = torch.cat([_by_key(o, k) for o, k in zip(offsets, num_keys, strict=True)])  # (F, B + 1)
    ends = table if index is None else offsets_of(table.diff().index_select(1, index))
    taken = ends.index_select(1, bounds).diff().t() * width  # (R, F) bytes
    for column in taken.split(list(num_keys), dim=1):
        column[:, -1] += -column.sum(1) % ALIGNMENT  # the gap behind the section
    if block_offsets is not None and block_offsets.is_cpu:
        held, room = taken.sum(1), block_offsets.diff() * buffer_dtype(values).itemsize
        if bool((held > room).any()):
            raise ValueError(
                f"block_offsets must leave room for what blocks hold, {held.tolist()} bytes, got {room.tolist()}"
            )
    cuts = offsets_of(taken.flatten())
    starts, num_bytes = cuts[:-1].view(taken.shape), cuts[-1]
    if block_offsets is not None:
        block_bytes = block_offsets * buffer_dtype(values).itemsize
        starts = starts + (block_bytes[:-1] - starts[:, 0])[:, None]
        num_bytes = block_bytes[-1]
    return _Plan(table, ends, starts, num_bytes)


def _places(
    plan: _Plan, key: int, bounds: Tensor, index: Tensor | None, words: int, word: int
) -> tuple[Tensor, Tensor]:
    """Of key `key`, whose values are `words` words of `word` bytes: `(T,)` where each word is in the buffer, and where
    in its column."""
    ends = plan.ends[key]
    at_bounds = ends.index_select(0, bounds)  # (R + 1,)
    first, stop = int(at_bounds[0]) * words, int(at_bounds[-1]) * words
    places = torch.arange(first, stop, device=bounds.device)
    shift = plan.cuts[:, key] // word - at_bounds[:-1] * words
    packed = places + torch.repeat_interleave(shift, at_bounds.diff() * words, output_size=stop - first)
    if index is None:
        return packed, places
    return packed, source_places(plan.offsets[key] * words, index, ends * words, stop)


def _moves(
    blocks: Tensor, values: Sequence[Tensor], num_keys: Sequence[int], plan: _Plan, bounds: Tensor, index: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each key the words of the buffer, their places, the words of its column, and their places."""
    key = 0
    for column, count in zip(values, num_keys, strict=True):
        word = narrowest_word(column)
        packed, own = as_words(blocks, word), as_words(column, word)
        for _ in range(count):
            packed_places, places = _places(plan, key, bounds, index, value_bytes(column) // word, word)
            yield packed, packed_places, own, places
            key += 1


def reference_dispatch(
    values: Sequence[Tensor],
    offsets: Sequence[Tensor],
    num_keys: Sequence[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
    out_size: int | None,
) -> tuple[Tensor, Tensor]:
    """The definition: every word to its place; a fixed number of torch calls for each key, whatever R and n."""
    plan = _plan(values, offsets, num_keys, bounds, index, block_offsets)
    dtype = buffer_dtype(values)
    size = int(plan.num_bytes) // dtype.itemsize if out_size is None else out_size
    _check_room(plan, size * dtype.itemsize, "out_size")
    blocks = torch.zeros(size, dtype=dtype, device=bounds.device)
    for packed, packed_places, own, places in _moves(blocks, values, num_keys, plan, bounds, index):
        packed.index_copy_(0, packed_places, own.index_select(0, places))
    return blocks, dense_offsets(plan.cuts, plan.num_bytes, dtype) if block_offsets is None else block_offsets.clone()


def reference_combine(
    blocks: Tensor,
    out: Sequence[Tensor],
    offsets: Sequence[Tensor],
    num_keys: Sequence[int],
    bounds: Tensor,
    index: Tensor | None,
    block_offsets: Tensor | None,
) -> None:
    """The definition: every word from its place in `blocks` to that in `out`."""
    plan = _plan(out, offsets, num_keys, bounds, index, block_offsets)
    _check_room(plan, blocks.numel() * blocks.element_size(), "blocks")
    for packed, packed_places, own, places in _moves(blocks, out, num_keys, plan, bounds, index):
        own.index_copy_(0, places, packed.index_select(0, packed_places))


def _check_room(plan: _Plan, num_bytes: int, name: str) -> None:
    if plan.num_bytes.is_cpu and int(plan.num_bytes) > num_bytes:
        raise ValueError(f"{name} must come to the {int(plan.num_bytes)} bytes of all blocks, got {num_bytes}")


def dense_offsets(cuts: Tensor, num_bytes: Tensor, dtype: torch.dtype) -> Tensor:
    """`(R + 1,)` where blocks begin, in elements, from the keys' `(R, F)` places in bytes."""
    return torch.cat([cuts[:, 0], num_bytes[None]]) // dtype.itemsize


def _by_key(offsets: Tensor, num_keys: int) -> Tensor:
    """`(K, B + 1)` from `(K * B + 1,)`."""
    num_samples = (offsets.shape[0] - 1) // num_keys
    offsets = offsets.contiguous()
    return offsets.as_strided((num_keys, num_samples + 1), (num_samples, 1), offsets.storage_offset())
