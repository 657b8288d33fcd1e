"""One maker for every kind of leaf: from sample ids to the leaf, and back from the leaf to what each sample holds."""

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fs_data import Jagged, JaggedColumn, Nested, NestedColumn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM warns of operators that its CPU build lacks
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

Ids = Sequence[int]


@dataclass(frozen=True)
class LeafMaker:
    make: Callable[[Ids], Any]
    """A leaf, or a dict of leaves, for samples `ids`."""
    per_sample: Callable[[Any], list[Any]]
    """What each sample holds, as plain values."""
    declared: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Kinds to declare, by path below the leaf."""


def _lengths(ids: Ids, salt: int) -> list[int]:
    return [(i * 7 + salt * 3) % 5 for i in ids]


def _row(i: int, salt: int) -> list[int]:
    """A jagged row of sample i: 0 to 4 small numbers."""
    return [(i + 10 * salt + k) % 100 for k in range(_lengths([i], salt)[0])]


def _rows(ids: Ids, salt: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    values = torch.tensor([x for i in ids for x in _row(i, salt)], dtype=torch.int64).to(dtype)
    return values, torch.tensor(_lengths(ids, salt), dtype=torch.int64)


def _split(values: Tensor, lengths: Tensor) -> list[Any]:
    return [x.double().tolist() for x in values.split(lengths.tolist())]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def dense(dtype: torch.dtype, shape: tuple[int, ...]) -> LeafMaker:
    def make(ids: Ids) -> Tensor:
        base = torch.tensor([i % 100 for i in ids], dtype=torch.int64).view(-1, *[1] * len(shape))
        return base.expand(-1, *shape).contiguous().to(dtype)

    return LeafMaker(make, lambda x: x.to(torch.complex128).tolist())


def _nested(ids: Ids) -> NestedColumn:
    candidates = torch.tensor([len(_row(i, 5)) for i in ids], dtype=torch.int64)
    contents = [_row(c + i, 6) for i in ids for c in _row(i, 5)]
    lengths = torch.tensor([len(c) for c in contents], dtype=torch.int64)
    values = torch.tensor([x for c in contents for x in c], dtype=torch.int32)
    return NestedColumn(values, _offsets(lengths), _offsets(candidates))


def _nested_per_sample(x: NestedColumn) -> list[Any]:
    contents = [c.tolist() for c in x.values.split(x.inner_offsets.diff().tolist())]
    outer = x.outer_offsets.tolist()
    return [contents[a:b] for a, b in itertools.pairwise(outer)]


def _triple(ids: Ids) -> dict[str, Tensor]:
    x = _nested(ids)
    return {"content": x.values, "n": x.outer_offsets.diff().int(), "lengths": x.inner_offsets.diff()}


def _kjt(weighted: bool) -> Callable[[Ids], KeyedJaggedTensor]:
    def make(ids: Ids) -> KeyedJaggedTensor:
        parts = [_rows(ids, salt) for salt in (1, 2, 3)]
        values = torch.cat([v for v, _ in parts])
        weights = values.float() / 2 if weighted else None
        return KeyedJaggedTensor(["a", "b", "c"], values, weights, lengths=torch.cat([n for _, n in parts]).int())

    return make


def _shared_kjt(ids: Ids) -> KeyedJaggedTensor:
    """Samples with equal i % 2 share a row of the first key, with equal i % 3 one of the second."""
    first = [list(dict.fromkeys(i % m for i in ids)) for m in (2, 3)]
    rows = [(_rows(kinds, salt)) for salt, kinds in enumerate(first, start=1)]
    inverse = [[kinds.index(i % m) for i in ids] for m, kinds in zip((2, 3), first, strict=True)]
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.cat([v for v, _ in rows]),
        lengths=torch.cat([n for _, n in rows]),
        stride_per_key_per_rank=[[len(kinds)] for kinds in first],
        inverse_indices=(["a", "b"], torch.tensor(inverse)),
    )


def _shared_per_sample(kjt: KeyedJaggedTensor) -> list[Any]:
    _, inverse = kjt.inverse_indices()
    rows = [_split(kjt[k].values(), kjt[k].lengths()) for k in kjt.keys()]
    assert all(sorted(set(used)) == list(range(len(r))) for used, r in zip(inverse.tolist(), rows, strict=True))
    return [[r[i] for r, i in zip(rows, where, strict=True)] for where in inverse.T.tolist()]


def _kjt_per_sample(kjt: KeyedJaggedTensor) -> list[Any]:
    assert list(kjt.keys()) == ["a", "b", "c"]
    columns = [_split(kjt[k].values(), kjt[k].lengths()) for k in kjt.keys()]
    if kjt.weights_or_none() is not None:
        columns += [_split(kjt[k].weights(), kjt[k].lengths()) for k in kjt.keys()]
    return list(zip(*columns, strict=True))


LEAVES: dict[str, LeafMaker] = {
    **{
        f"dense {str(dtype)[6:]} {shape}": dense(dtype, shape)
        for dtype, shape in [
            (torch.bool, ()), (torch.int8, (3,)), (torch.bfloat16, (2, 2)), (torch.float16, ()), (torch.float64, (1,)),
            (torch.uint8, (5,)), (torch.int32, ()), (torch.complex64, ()), (torch.float32, (0,)), (torch.uint16, (3,)),
        ]
    },
    "numpy": LeafMaker(lambda ids: np.asarray(ids, np.float32)[:, None], lambda x: x.tolist()),
    "jagged "
    "column": LeafMaker(lambda ids: JaggedColumn.from_lengths(*_rows(ids, 1)), lambda x: _split(x.values, x.lengths)),
    "jagged column of vectors": LeafMaker(
        lambda ids: JaggedColumn.from_lengths(_rows(ids, 2, torch.bfloat16)[0][:, None].repeat(1, 3), _rows(ids, 2)[1]),
        lambda x: _split(x.values, x.lengths),
    ),
    "values with lengths": LeafMaker(
        lambda ids: dict(zip(("values", "n"), _rows(ids, 3, torch.int16), strict=True)),
        lambda x: _split(x["values"], x["n"]),
        {"values": Jagged(lengths="n")},
    ),
    "values with offsets": LeafMaker(
        lambda ids: {"values": _rows(ids, 4)[0], "ends": _offsets(_rows(ids, 4)[1]).int()},
        lambda x: _split(x["values"], x["ends"].diff()),
        {"values": Jagged(offsets="ends")},
    ),
    "list of tensors": LeafMaker(
        lambda ids: [torch.tensor(_row(i, 1), dtype=torch.int64) for i in ids],
        lambda x: [r.tolist() for r in x],
        {"": Jagged()},
    ),
    "jagged nested tensor": LeafMaker(
        lambda ids: torch.nested.nested_tensor_from_jagged(_rows(ids, 2, torch.float32)[0], _offsets(_rows(ids, 2)[1])),
        lambda x: _split(x.values(), x.offsets().diff()),
    ),
    "nested": LeafMaker(_nested, _nested_per_sample),
    "nested by three leaves": LeafMaker(
        _triple,
        lambda x: _nested_per_sample(NestedColumn(x["content"], _offsets(x["lengths"]), _offsets(x["n"].long()))),
        {"content": Nested(candidates="n", lengths="lengths")},
    ),
    "torchrec jagged": LeafMaker(
        lambda ids: JaggedTensor(*_rows(ids, 1)[:1], lengths=_rows(ids, 1)[1], weights=_rows(ids, 1, torch.float32)[0]),
        lambda x: list(zip(_split(x.values(), x.lengths()), _split(x.weights(), x.lengths()), strict=True)),
    ),
    "keyed": LeafMaker(_kjt(False), _kjt_per_sample),
    "keyed with weights": LeafMaker(_kjt(True), _kjt_per_sample),
    "keyed with shared rows": LeafMaker(_shared_kjt, _shared_per_sample),
    "objects": LeafMaker(
        lambda ids: [{"id": i, "tags": ("x", [None, True, i / 3])} if i % 3 else f"é{i}" for i in ids],
        lambda x: list(x),
    ),
}  # fmt: skip


@dataclasses.dataclass
class Record:
    id: Any
    rest: Any
    eps: float = 0.5


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    id: Any
    rest: Any


Tuple = collections.namedtuple("Tuple", ["id", "rest"])


class Custom:
    """Neither a dataclass nor a dict, as batches with a `pin_memory` of their own are."""

    def __init__(self, id: Any, rest: Any) -> None:
        self.id, self.rest = id, rest
        self.note = "stays"


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda id, rest: {"id": id, "rest": rest},
    "ordered dict": lambda id, rest: collections.OrderedDict(id=id, rest=rest),
    "list": lambda id, rest: [id, rest],
    "tuple": lambda id, rest: (id, rest),
    "named tuple": Tuple,
    "dataclass": Record,
    "frozen dataclass": FrozenRecord,
    "custom class": Custom,
}


def parts(batch: Any) -> tuple[Any, Any]:
    """A container's two parts."""
    if isinstance(batch, dict):
        return batch["id"], batch["rest"]
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return batch[0], batch[1]
    return batch.id, batch.rest


def prefix(container: str) -> str:
    """Where the second part lies."""
    return "1" if container in ("list", "tuple") else "rest"
