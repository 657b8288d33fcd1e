"""What the kernels that only move rows are timed at: heavy-tailed rows of ids, and of values of 512 bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import fs_kernels
from benchmarks.kernel_case import Case, fbgemm

RANKS = 32
KEYS = 8
MEAN_LENGTH = 300


@dataclass(frozen=True)
class Batch:
    """KEYS keys of B samples, key-major, on the device, with the lengths on the host too."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor
    """`(KEYS * B,)` int64 on the host."""
    kind: str

    @property
    def num_samples(self) -> int:
        return len(self.lengths) // KEYS

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def batches(num_bytes: int) -> Iterator[Batch]:
    for kind, inner, dtype in (("8-byte ids", (), torch.int64), ("512-byte rows", (128,), torch.float32)):
        width = dtype.itemsize * (inner[0] if inner else 1)
        num_rows = max(num_bytes // width // MEAN_LENGTH // KEYS, 1) * KEYS
        lengths = _lengths(num_rows, num_bytes / width / num_rows)
        values = torch.empty(int(lengths.sum()), *inner, dtype=dtype, device="cuda")
        values = values.random_(0, 1 << 20) if dtype == torch.int64 else values.normal_()
        yield Batch(values, _offsets(lengths).cuda(), lengths, kind)


def copy_cases(num_bytes: int) -> Iterator[Case]:
    for make in (_permute, _transpose, _dispatch, _dispatch_index, _combine, _combine_index):
        for batch in batches(num_bytes):
            yield make(batch)


def _permute(b: Batch) -> Case:
    index = torch.randperm(len(b.lengths)).cuda()
    return Case(
        kernel=f"jagged_permute, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.jagged_permute(b.values, b.offsets, index, out_size=len(b.values)),
        torch=lambda: gather_rows(b.values, b.offsets, index, len(b.values)),
        fbgemm=_fbgemm_permute(b, index),
    )


def _transpose(b: Batch) -> Case:
    index = torch.arange(len(b.lengths), device="cuda").view(KEYS, -1).t().flatten()
    return Case(
        kernel=f"keyed_transpose, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.keyed_transpose(b.values, b.offsets, KEYS),
        torch=lambda: gather_rows(b.values, b.offsets, _transposed(len(b.lengths)), len(b.values)),
        fbgemm=_fbgemm_permute(b, index),
    )


def _dispatch(b: Batch) -> Case:
    return dispatch_case(b, _bounds(b.num_samples), None)


def _dispatch_index(b: Batch) -> Case:
    return dispatch_case(b, _bounds(b.num_samples), torch.randperm(b.num_samples).cuda())


def _combine(b: Batch) -> Case:
    return combine_case(b, _bounds(b.num_samples), None)


def _combine_index(b: Batch) -> Case:
    return combine_case(b, _bounds(b.num_samples), torch.randperm(b.num_samples).cuda())


def dispatch_case(b: Batch, bounds: Tensor, index: Tensor | None) -> Case:
    """All samples, to the ranks in `bounds`; torch and FBGEMM make the same blocks without gaps between sections."""
    columns, keys = [(b.values, b.offsets)], [KEYS]
    blocks, _ = fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys)
    size = len(blocks)
    rows, offsets = _ranges(b, bounds, index)
    return Case(
        kernel=f"ranged_dispatch{_with(index)}, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys, out_size=size),
        torch=lambda: gather_rows(b.values, offsets, rows, len(b.values)),
        fbgemm=_fbgemm_permute(b, rows, offsets.diff()),
    )


def combine_case(b: Batch, bounds: Tensor, index: Tensor | None) -> Case:
    columns, keys, sizes = [(b.values, b.offsets)], [KEYS], [len(b.values)]
    blocks, _ = fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys)
    like = [(b.values[:0], b.offsets)]
    rows, offsets = _ranges(b, bounds, index)
    back, packed_offsets = _inverse(rows), _offsets(offsets.diff()[rows].cpu()).cuda()
    dense = Batch(gather_rows(b.values, offsets, rows, len(b.values)), packed_offsets, b.lengths, b.kind)
    return Case(
        kernel=f"ranged_combine{_with(index)}, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.ranged_combine(blocks, like, bounds, index=index, num_keys=keys, out_sizes=sizes),
        torch=lambda: gather_rows(dense.values, packed_offsets, back, len(b.values)),
        fbgemm=_fbgemm_permute(dense, back, packed_offsets.diff()),
    )


def gather_rows(values: Tensor, offsets: Tensor, index: Tensor, out_size: int) -> Tensor:
    """Rows of a jagged tensor in another order, in torch: one gather, from where each value is."""
    lengths = offsets.diff()[index]
    shift = offsets[index] - (lengths.cumsum(0) - lengths)
    places = torch.repeat_interleave(shift, lengths, output_size=out_size)
    return values.index_select(0, places.add_(torch.arange(out_size, device=values.device)))


def _ranges(b: Batch, bounds: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of a jagged tensor, and its offsets, that make the blocks: ranges, or with `index` single samples."""
    if index is None:
        starts = torch.arange(KEYS, device="cuda")[:, None] * b.num_samples + bounds[:-1]  # (KEYS, R)
        offsets = torch.cat([b.offsets[starts.flatten()], b.offsets[-1:]])
        return _transposed(starts.numel()), offsets
    rank = torch.repeat_interleave(torch.arange(len(bounds) - 1, device="cuda"), bounds.diff())
    rows = torch.arange(KEYS, device="cuda")[:, None] * b.num_samples + index  # (KEYS, n)
    order = (rank * KEYS + torch.arange(KEYS, device="cuda")[:, None]).flatten().argsort(stable=True)
    return rows.flatten()[order], b.offsets


def _transposed(num_rows: int) -> Tensor:
    return torch.arange(num_rows, device="cuda").view(KEYS, -1).t().flatten()


def _fbgemm_permute(b: Batch, index: Tensor, lengths: Tensor | None = None) -> Callable[[], object] | None:
    ops = fbgemm()
    if ops is None:
        return None
    lengths = b.offsets.diff() if lengths is None else lengths
    if b.values.dim() == 2:
        return lambda: ops.jagged_index_select(b.values, lengths, index, len(b.values))[0]
    narrow = index.int()
    return lambda: ops.permute_1D_sparse_data(narrow, lengths, b.values, None, len(b.values))[1]


def _with(index: Tensor | None) -> str:
    return "" if index is None else " of any samples"


def _bounds(num_samples: int) -> Tensor:
    return torch.linspace(0, num_samples, RANKS + 1).long().cuda()


def _inverse(rows: Tensor) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))


def _lengths(num_rows: int, mean: float) -> Tensor:
    """`(num_rows,)` heavy-tailed lengths of about this mean."""
    torch.manual_seed(0)
    drawn = torch.distributions.LogNormal(0.0, 0.9).sample((num_rows,))
    return (drawn * (mean / drawn.mean())).long().clamp(min=1)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
