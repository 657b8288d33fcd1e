"""Ids by feature, from TorchRec's `KeyedJaggedTensor` or from a plain mapping, and how tables share them out.

Legend: B samples, N ids of a feature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fs_embed.rows import TableConfig


@dataclass(frozen=True, slots=True)
class FeatureIds:
    values: Tensor
    """`(N,)`, any integer dtype."""
    lengths: Tensor
    """`(B,)`."""
    weights: Tensor | None = None
    """`(N,)` float: one for each id, where samples are weighted."""


@dataclass(frozen=True, slots=True)
class FeatureOfTable:
    """One lookup of a forward: a feature in a table; output under `key`."""

    feature: str
    table: int
    key: str


def features_of(tables: Sequence[TableConfig]) -> list[FeatureOfTable]:
    """In TorchRec's order; a feature that several tables look up comes out as `feature@table`."""
    all_names = [name for table in tables for name in table.feature_names]
    out: list[FeatureOfTable] = []
    for number, table in enumerate(tables):
        if not table.feature_names:
            raise ValueError(f"table {table.name!r} must have feature_names, or nothing would look it up")
        for feature in table.feature_names:
            key = feature if all_names.count(feature) == 1 else f"{feature}@{table.name}"
            out.append(FeatureOfTable(feature, number, key))
    return out


def read_features(ids: Any, wanted: Sequence[str]) -> tuple[list[Tensor], dict[str, FeatureIds]]:
    """The tensors by which the input is known again, and each wanted feature's ids.

    Args:
        ids: A `KeyedJaggedTensor`, or a mapping from feature to jagged ids (`values` and `offsets`), a dense tensor
            `(B,)` or `(B, L)` of ids, or a `JaggedTensor`. More features than wanted may come.
    """
    if isinstance(ids, Mapping):
        features = {name: _plain(name, ids[name]) for name in wanted if name in ids}
        sources = [t for f in features.values() for t in (f.values, f.lengths)]
    elif hasattr(ids, "keys") and hasattr(ids, "offset_per_key"):
        features = _keyed(ids, wanted)
        sources = [ids.values()]
    else:
        raise ValueError(
            f"ids must be a KeyedJaggedTensor or a mapping from feature to jagged ids, got {type(ids).__name__}"
        )
    if missing := [name for name in wanted if name not in features]:
        raise ValueError(f"the input must have features {list(wanted)}, {missing} are missing")
    return sources, features


def _keyed(kjt: Any, wanted: Sequence[str]) -> dict[str, FeatureIds]:
    keys: list[str] = list(kjt.keys())
    values, weights = kjt.values(), kjt.weights_or_none()
    if not keys or not any(kjt.stride_per_key()):
        nothing = values.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=values.device)
        return {name: FeatureIds(*nothing, None if weights is None else weights[:0]) for name in keys}
    bounds: list[int] = list(kjt.offset_per_key())
    sizes: list[int] = list(kjt.stride_per_key())
    lengths = kjt.lengths().split(sizes)
    out: dict[str, FeatureIds] = {}
    for j, key in enumerate(keys):
        if key in wanted:
            cut = slice(bounds[j], bounds[j + 1])
            out[key] = FeatureIds(values[cut], lengths[j], None if weights is None else weights[cut])
    return out


def _plain(name: str, ids: Any) -> FeatureIds:
    if isinstance(ids, Tensor):
        if ids.dim() not in (1, 2):
            raise ValueError(f"feature {name!r} must be (B,) or (B, L) as a dense tensor, got {tuple(ids.shape)}")
        length = 1 if ids.dim() == 1 else ids.shape[1]
        return FeatureIds(ids.reshape(-1), torch.full((len(ids),), length, device=ids.device))
    if callable(getattr(ids, "values", None)) and callable(getattr(ids, "lengths", None)):  # a JaggedTensor
        return FeatureIds(ids.values(), ids.lengths(), ids.weights_or_none())
    if hasattr(ids, "values") and hasattr(ids, "offsets"):
        return FeatureIds(ids.values, ids.offsets.diff())
    raise ValueError(f"feature {name!r} must be jagged ids or a tensor, got {type(ids).__name__}")
