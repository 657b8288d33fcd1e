"""What the kernels that only move rows are timed at: heavy-tailed rows of ids, and of values of 512 bytes."""

from collections.abc import Iterator
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
        fbgemm=(lambda: _fbgemm_permute(b.values, b.offsets.diff(), index)) if fbgemm() else None,
    )


def _transpose(b: Batch) -> Case:
    index = _transposed(len(b.lengths))
    return Case(
        kernel=f"keyed_transpose, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.keyed_transpose(b.values, b.offsets, KEYS),
        torch=lambda: gather_rows(b.values, b.offsets, _transposed(len(b.lengths)), len(b.values)),
        fbgemm=(lambda: _fbgemm_permute(b.values, b.offsets.diff(), index)) if fbgemm() else None,
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
    """All samples, to the ranks in `bounds`; torch and FBGEMM plan and make the same blocks, without gaps in them."""
    columns, keys = [(b.values, b.offsets)], [KEYS]
    blocks, _ = fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys)
    size = len(blocks)

    def by_fbgemm() -> Tensor:
        rows, offsets = _ranges(b, bounds, index)
        return _fbgemm_permute(b.values, offsets.diff(), rows)

    return Case(
        kernel=f"ranged_dispatch{_with(index)}, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys, out_size=size),
        torch=lambda: gather_rows(b.values, *_ranges(b, bounds, index)[::-1], len(b.values)),
        fbgemm=by_fbgemm if fbgemm() else None,
    )


def combine_case(b: Batch, bounds: Tensor, index: Tensor | None) -> Case:
    columns, keys, sizes = [(b.values, b.offsets)], [KEYS], [len(b.values)]
    blocks, _ = fs_kernels.ranged_dispatch(columns, bounds, index=index, num_keys=keys)
    like = [(b.values[:0], b.offsets)]
    rows, offsets = _ranges(b, bounds, index)
    dense = gather_rows(b.values, offsets, rows, len(b.values))

    def inverse() -> tuple[Tensor, Tensor]:
        rows, offsets = _ranges(b, bounds, index)
        packed = _offsets(offsets.diff()[rows])
        return packed, torch.empty_like(rows).index_copy_(0, rows, torch.arange(len(rows), device="cuda"))

    def by_fbgemm() -> Tensor:
        packed, back = inverse()
        return _fbgemm_permute(dense, packed.diff(), back)

    return Case(
        kernel=f"ranged_combine{_with(index)}, {b.kind}",
        num_bytes=2 * b.num_bytes,
        ours=lambda: fs_kernels.ranged_combine(blocks, like, bounds, index=index, num_keys=keys, out_sizes=sizes),
        torch=lambda: gather_rows(dense, *inverse(), len(b.values)),
        fbgemm=by_fbgemm if fbgemm() else None,
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
    rank = torch.searchsorted(bounds, torch.arange(len(index), device="cuda"), right=True) - 1
    rows = torch.arange(KEYS, device="cuda")[:, None] * b.num_samples + index  # (KEYS, n)
    order = (rank * KEYS + torch.arange(KEYS, device="cuda")[:, None]).flatten().argsort(stable=True)
    return rows.flatten()[order], b.offsets


def _transposed(num_rows: int) -> Tensor:
    return torch.arange(num_rows, device="cuda").view(KEYS, -1).t().flatten()


def _fbgemm_permute(values: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    ops = fbgemm()
    if values.dim() == 2:
        return ops.jagged_index_select(values, lengths, index, len(values))[0]
    return ops.permute_1D_sparse_data(index.int(), lengths, values, None, len(values))[1]


def _with(index: Tensor | None) -> str:
    return "" if index is None else " of any samples"


def _bounds(num_samples: int) -> Tensor:
    return torch.linspace(0, num_samples, RANKS + 1).long().cuda()


def _lengths(num_rows: int, mean: float) -> Tensor:
    """`(num_rows,)` heavy-tailed lengths of about this mean."""
    torch.manual_seed(0)
    drawn = torch.distributions.LogNormal(0.0, 0.9).sample((num_rows,))
    return (drawn * (mean / drawn.mean())).long().clamp(min=1)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
