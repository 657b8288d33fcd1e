"""Blocks of samples on a GPU: all peers and columns in a few kernels, in the layout of `pack`.

Legend: R blocks, K keys of a column, n samples that are exchanged.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.column import Column, ColumnSpec, to_offsets
from fs_data.pack import as_bytes
from fs_kernels import ranged_combine, ranged_dispatch

Ints = NDArray[np.int64]
_LENGTH_BYTES = 8


def device_of(columns: Sequence[Column]) -> torch.device:
    """The GPU where any of `columns` is, else the host; text, for one, is on the host in every batch."""
    return next((c.values.device for c in columns if c.values.is_cuda), torch.device("cpu"))


def pack_all(columns: Sequence[Column], samples: Sequence[Ints], block_bytes: Sequence[int]) -> Tensor:
    """uint8: a block for each of `samples`, which hold `(n,)` samples of `columns` each, of so many bytes.

    The sizes are those of `fs_data.pack.block_bytes`, so that the receiver knows them too.
    """
    device = device_of(columns)
    jagged = [c for c in columns if c.offsets is not None]
    host = [
        np.concatenate(samples),
        to_offsets(np.asarray([len(s) for s in samples])),
        to_offsets(np.asarray(block_bytes)),
    ]
    for c in jagged:
        assert c.offsets is not None
        host += [c.lengths.ravel(), c.offsets]
    index, bounds, block_offsets, *of_columns = _upload(host, device)
    lengths, offsets = of_columns[::2], iter(of_columns[1::2])
    one_each = _one_each(columns[0].num_samples, columns, device)
    sections = [(x[:, None].view(torch.uint8), one_each[: len(x) + 1]) for x in lengths]
    for c in columns:
        values = as_bytes(c.values.to(device)).view(len(c.values), c.spec.value_bytes)
        sections.append((values, one_each[: len(values) + 1] if c.offsets is None else next(offsets)))
    blocks, _ = ranged_dispatch(
        sections,
        bounds,
        index=index,
        num_keys=_keys(jagged) + _keys(columns),
        block_offsets=block_offsets,
        out_size=sum(block_bytes),
    )
    return blocks


def unpack_all(
    specs: Sequence[ColumnSpec], blocks: Tensor, num_samples: Sequence[int], block_bytes: Sequence[int], order: Ints
) -> list[Column]:
    """The columns of all samples in `blocks`, each of which holds so many; `order` `(n,)` is where each goes."""
    n, device = len(order), blocks.device
    jagged = [s.num_keys for s in specs if s.num_keys is not None]
    keys = [s.num_keys or 1 for s in specs]
    index, bounds, block_offsets = _upload(
        [order, to_offsets(np.asarray(num_samples)), to_offsets(np.asarray(block_bytes))], device
    )
    one_each = torch.arange(n * max([1, *jagged]) + 1, device=device)
    lengths = [(blocks.new_empty(0, _LENGTH_BYTES), one_each[: n * k + 1]) for k in jagged]
    found: list[Ints] = []
    if jagged:  # they open each block; what follows them takes room, but need not be known for them
        sizes = [n * k for k in jagged]
        here = ranged_combine(
            blocks, lengths, bounds, index=index, num_keys=jagged, block_offsets=block_offsets, out_sizes=sizes
        )
        found = np.split(torch.cat(here).cpu().view(torch.int64).ravel().numpy(), np.cumsum(sizes)[:-1])
    of_columns = iter([to_offsets(x) for x in found])
    offsets = [None if s.num_keys is None else next(of_columns) for s in specs]
    on_device = iter(_upload([o for o in offsets if o is not None], device))
    values = [
        (blocks.new_empty(0, s.value_bytes), one_each[: n + 1] if s.num_keys is None else next(on_device))
        for s in specs
    ]
    num_values = [n if o is None else int(o[-1]) for o in offsets]
    out = ranged_combine(
        blocks,
        lengths + values,
        bounds,
        index=index,
        num_keys=jagged + keys,
        block_offsets=block_offsets,
        out_sizes=[n * k for k in jagged] + num_values,
    )
    columns: list[Column] = []
    for spec, x, o, k in zip(specs, out[len(jagged) :], offsets, keys, strict=True):
        columns.append(Column(x.flatten().view(spec.dtype).view(len(x), *spec.shape), o, k))
    return columns


def _keys(columns: Sequence[Column]) -> list[int]:
    return [c.num_keys if c.offsets is not None else 1 for c in columns]


def _one_each(num_samples: int, columns: Sequence[Column], device: torch.device) -> Tensor:
    """Offsets of rows of one value, for as many rows as any column has."""
    return torch.arange(num_samples * max(c.num_keys for c in columns) + 1, device=device)


def _upload(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """`arrays` on `device` by a single copy, which the host does not wait for."""
    # Each begins at a multiple of 16 bytes: kernels are compiled for that.
    padded = [np.append(a, [0] * (len(a) % 2)).astype(np.int64) for a in arrays]
    flat = torch.from_numpy(np.concatenate([*padded, np.zeros(0, np.int64)]))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([len(p) for p in padded])
    return [p[: len(a)] for p, a in zip(parts, arrays, strict=True)]
