"""How each kind of leaf splits into samples, and how it is put together again in the type it had.

A *kind* (`Dense`, `Jagged`, …) is what a user declares; with the leaf's first value it gives a *form*, which turns
values into columns and columns into values of the same type.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from fs_data.column import Column, ColumnSpec, Part, join, to_offsets
from fs_data.errors import SchemaError
from fs_data.jagged import JaggedColumn, NestedColumn
from fs_data.tree import type_name


class Form(ABC):
    """Values at one or more paths of a batch ↔ columns. Frozen and picklable: another rank may need it."""

    @abstractmethod
    def split(self, values: Sequence[Any]) -> list[Column]:
        """Columns of equal numbers of samples; raises SchemaError without the leaf's name."""

    @abstractmethod
    def join(self, columns: Sequence[Column]) -> list[Any]:
        """Values that `split` would turn into `columns`."""


class Kind(ABC):
    """What a user declares about a leaf."""

    companions: ClassVar[tuple[str, ...]] = ()
    """Fields that name other leaves which this one is read and written with."""

    @abstractmethod
    def form(self, values: Sequence[Any]) -> Form:
        """The form for the leaf's value, followed by those of its companions."""


# ---- Dense ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense(Kind):
    """A tensor or array whose dimension 0 is the sample."""

    def form(self, values: Sequence[Any]) -> Form:
        return _TensorForm(_Like.of(values[0]))


@dataclass(frozen=True)
class _TensorForm(Form):
    like: "_Like"

    def split(self, values: Sequence[Any]) -> list[Column]:
        value = _tensor(values[0])
        if value.dim() == 0:
            raise SchemaError(
                "has no dimension, so it cannot be split into samples; declare it PerBatch() or Derived(fn)"
            )
        return [Column(value)]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        return [self.like.restore(columns[0].values)]


# ---- Jagged ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jagged(Kind):
    """One row of any length for each sample.

    For a plain tensor of values, name the leaf with its lengths `(B,)` or offsets `(B + 1,)`. `JaggedColumn`,
    TorchRec's `JaggedTensor`, jagged `torch.nested` tensors and lists of tensors, one a sample, bring their own.
    """

    lengths: str | None = None
    offsets: str | None = None
    companions: ClassVar[tuple[str, ...]] = ("lengths", "offsets")

    def form(self, values: Sequence[Any]) -> Form:
        value = values[0]
        if self.lengths or self.offsets:
            if self.lengths and self.offsets:
                raise SchemaError("is declared with both lengths and offsets; name one of them")
            return _PairForm(self.offsets is not None, *_Like.of_all(values))
        if type_name(value) == "JaggedColumn":
            return _JaggedColumnForm()
        if type_name(value) == "JaggedTensor":
            return _JaggedTensorForm(value.weights_or_none() is not None)
        if isinstance(value, Tensor) and value.is_nested:
            return _NestedTensorForm()
        if isinstance(value, list):
            row = value[0] if value else torch.empty(0)
            return _TensorListForm(_Like.of(row), tuple(row.shape[1:]))
        raise SchemaError(
            f"is declared Jagged, but a {type(value).__name__} does not say where its rows end; name the leaf that "
            "does, as in Jagged(lengths='...')"
        )


@dataclass(frozen=True)
class _JaggedColumnForm(Form):
    def split(self, values: Sequence[Any]) -> list[Column]:
        return [_jagged(values[0].values, values[0].offsets)]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        return [JaggedColumn(columns[0].values, _offsets(columns[0]))]


@dataclass(frozen=True)
class _PairForm(Form):
    """Values at one path, their lengths or offsets at another."""

    has_offsets: bool
    values: "_Like"
    ends: "_Like"

    def split(self, values: Sequence[Any]) -> list[Column]:
        other = _counts(values[1])
        return [_jagged(_tensor(values[0]), other if self.has_offsets else _cumulate(other))]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        offsets = _offsets(columns[0])
        ends = offsets if self.has_offsets else offsets.diff()
        return [self.values.restore(columns[0].values), self.ends.restore(ends)]


@dataclass(frozen=True)
class _JaggedTensorForm(Form):
    has_weights: bool

    def split(self, values: Sequence[Any]) -> list[Column]:
        offsets = values[0].offsets()
        columns = [_jagged(values[0].values(), offsets)]
        return [*columns, _jagged(values[0].weights(), offsets)] if self.has_weights else columns

    def join(self, columns: Sequence[Column]) -> list[Any]:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        offsets = _offsets(columns[0])
        weights = columns[1].values if self.has_weights else None
        return [JaggedTensor(columns[0].values, weights=weights, lengths=offsets.diff(), offsets=offsets)]


@dataclass(frozen=True)
class _NestedTensorForm(Form):
    """`torch.nested` of the jagged layout, ragged in dimension 1."""

    def split(self, values: Sequence[Any]) -> list[Column]:
        value = values[0]
        if value.layout != torch.jagged or value._ragged_idx != 1 or value._lengths is not None:
            raise SchemaError("is a nested tensor that is not jagged in dimension 1 without holes; make it so")
        return [_jagged(value.values(), value.offsets())]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        return [torch.nested.nested_tensor_from_jagged(columns[0].values, _offsets(columns[0]))]


@dataclass(frozen=True)
class _TensorListForm(Form):
    like: "_Like"
    shape: tuple[int, ...]
    """Of one value."""

    def split(self, values: Sequence[Any]) -> list[Column]:
        rows = [_tensor(row) for row in values[0]]
        joined = torch.cat(rows) if rows else torch.empty(0, *self.shape, dtype=self.like.dtype)
        return [Column(joined, to_offsets(np.asarray([len(row) for row in rows], np.int64)))]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        return [[self.like.restore(row) for row in columns[0].values.split(columns[0].lengths[0].tolist())]]


# ---- Nested ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nested(Kind):
    """Two levels: each sample has candidates, each candidate content of its own length.

    A plain tensor of content needs `candidates`, the leaf with the number of candidates of each sample `(B,)`, and
    `lengths`, the leaf with the length of each candidate's content `(C,)`. A `NestedColumn` brings both.
    """

    candidates: str | None = None
    lengths: str | None = None
    companions: ClassVar[tuple[str, ...]] = ("candidates", "lengths")

    def form(self, values: Sequence[Any]) -> Form:
        if self.candidates and self.lengths:
            return _NestedTripleForm(*_Like.of_all(values))
        if type_name(values[0]) == "NestedColumn":
            return _NestedColumnForm()
        raise SchemaError(
            f"is declared Nested, but a {type(values[0]).__name__} does not say where candidates and their content "
            "end; declare Nested(candidates='...', lengths='...') or use a NestedColumn"
        )


@dataclass(frozen=True)
class _NestedColumnForm(Form):
    """Two columns: the content's lengths, a row of them for each sample; the content itself, by sample."""

    def split(self, values: Sequence[Any]) -> list[Column]:
        inner, outer = _host(values[0].inner_offsets), _host(values[0].outer_offsets)
        lengths = Column(torch.from_numpy(np.diff(inner)), outer)
        _check_offsets(outer, len(lengths.values))
        _check_offsets(inner, len(values[0].values))
        return [lengths, Column(values[0].values, inner[outer])]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        lengths, content = columns
        inner = _cumulate(lengths.values).to(content.values.device)
        return [NestedColumn(content.values, inner, _offsets(lengths).to(content.values.device))]


@dataclass(frozen=True)
class _NestedTripleForm(Form):
    content: "_Like"
    candidates: "_Like"
    lengths: "_Like"

    def split(self, values: Sequence[Any]) -> list[Column]:
        content, candidates, lengths = _tensor(values[0]), _counts(values[1]), _counts(values[2])
        return _NestedColumnForm().split([NestedColumn(content, _cumulate(lengths), _cumulate(candidates))])

    def join(self, columns: Sequence[Column]) -> list[Any]:
        (nested,) = _NestedColumnForm().join(columns)
        candidates, lengths = nested.outer_offsets.diff(), nested.inner_offsets.diff()
        return [self.content.restore(nested.values), self.candidates.restore(candidates), self.lengths.restore(lengths)]


# ---- Keyed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keyed(Kind):
    """TorchRec's `KeyedJaggedTensor`: a row of any length for each feature and sample."""

    def form(self, values: Sequence[Any]) -> Form:
        kjt = values[0]
        if type_name(kjt) != "KeyedJaggedTensor":
            raise SchemaError(f"is declared Keyed, which means a KeyedJaggedTensor; got a {type(kjt).__name__}")
        if not kjt.keys():
            raise SchemaError("has no keys, so nothing to split into samples; declare it PerBatch()")
        has_shared_rows = bool(kjt.variable_stride_per_key())
        if has_shared_rows and kjt.inverse_indices_or_none() is None:
            raise SchemaError(
                "has a stride of its own for each key, but no inverse_indices that say which row each sample has; "
                "give it them"
            )
        return _KeyedForm(tuple(kjt.keys()), kjt.weights_or_none() is not None, kjt.lengths().dtype, has_shared_rows)


@dataclass(frozen=True)
class _KeyedForm(Form):
    """A stride of its own for each key comes with inverse indices: which row of the key each sample has.

    Rows that samples share are sent with each of them, and found again by a number of their own, so that they are
    stored once on the rank where they arrive.
    """

    keys: tuple[str, ...]
    has_weights: bool
    lengths_dtype: torch.dtype
    has_shared_rows: bool

    def split(self, values: Sequence[Any]) -> list[Column]:
        kjt = values[0]
        if tuple(kjt.keys()) != self.keys:
            raise SchemaError(f"must have the keys {list(self.keys)}, got {list(kjt.keys())}")
        if kjt.variable_stride_per_key() != self.has_shared_rows:
            raise SchemaError("must have one stride for all keys, or one for each, in all batches")
        offsets = _host(kjt.offsets())
        columns = [Column(kjt.values().detach(), offsets, len(self.keys))]
        if self.has_weights:
            columns.append(Column(kjt.weights().detach(), offsets, len(self.keys)))
        return self._spread(kjt, columns) if self.has_shared_rows else columns

    def join(self, columns: Sequence[Column]) -> list[Any]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        stride: dict[str, Any] = {"stride": columns[0].num_samples}
        if self.has_shared_rows:
            columns, stride = self._collapse(columns)
        offsets = _offsets(columns[0])
        weights = columns[1].values if self.has_weights else None
        lengths = offsets.diff().to(self.lengths_dtype)
        return [KeyedJaggedTensor(list(self.keys), columns[0].values, weights=weights, lengths=lengths, **stride)]

    def _spread(self, kjt: Any, columns: list[Column]) -> list[Column]:
        """Columns with a row for each key and sample, and one with each row's number, `(B, K)`."""
        names, inverse = kjt.inverse_indices()
        inverse = _host(inverse)[[list(names).index(k) for k in self.keys]]  # (K, B)
        first = np.cumsum([0, *kjt.stride_per_key()[:-1]])
        rows = (inverse + first[:, None]).ravel()  # (K * B,) in the rows of all keys
        spread: list[Column] = []
        for column in columns:
            assert column.offsets is not None
            as_rows = Column(column.values, column.offsets)
            one = ColumnSpec(column.values.dtype, tuple(column.values.shape[1:]), 1)
            joined = join(one, [Part(as_rows, rows)])
            spread.append(Column(joined.values, joined.offsets, len(self.keys)))
        # Two batches' rows have the same number by chance alone. Not from torch's generator, which models draw from.
        salt = int.from_bytes(os.urandom(8), "little", signed=True)
        numbers = (np.int64(salt) ^ rows).reshape(len(self.keys), -1).T
        return [*spread, Column(torch.from_numpy(numbers.copy()))]

    def _collapse(self, columns: Sequence[Column]) -> tuple[list[Column], dict[str, Any]]:
        """The first of each key's rows of one number, and the arguments that say how samples share them."""
        *data, numbers = columns
        num_samples = numbers.num_samples
        kept: list[Any] = []
        inverse: list[Any] = []
        for key in range(len(self.keys)):
            _, first, where = np.unique(numbers.values[:, key].cpu().numpy(), return_index=True, return_inverse=True)
            order = np.argsort(first)
            kept.append(key * num_samples + first[order])
            inverse.append(np.argsort(order)[where.ravel()])
        rows = np.concatenate(kept)
        collapsed: list[Column] = []
        for column in data:
            one = ColumnSpec(column.values.dtype, tuple(column.values.shape[1:]), 1)
            collapsed.append(join(one, [Part(Column(column.values, column.offsets), rows)]))
        indices = torch.from_numpy(np.stack(inverse)).to(data[0].values.device)
        strides = [[len(rows)] for rows in kept]
        return collapsed, {"stride_per_key_per_rank": strides, "inverse_indices": (list(self.keys), indices)}


# ---- Objects, PerBatch, Derived, Group ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objects(Kind):
    """A list with one plain value for each sample: None, bool, int, float, str, and lists, tuples and dicts of them."""

    def form(self, values: Sequence[Any]) -> Form:
        return _ObjectsForm(type(values[0]))


@dataclass(frozen=True)
class _ObjectsForm(Form):
    container: type

    def split(self, values: Sequence[Any]) -> list[Column]:
        texts = [json.dumps(_to_json(v), separators=(",", ":")).encode() for v in values[0]]
        data = (
            torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
            if texts
            else torch.empty(0, dtype=torch.uint8)
        )
        return [Column(data, to_offsets(np.asarray([len(t) for t in texts], np.int64)))]

    def join(self, columns: Sequence[Column]) -> list[Any]:
        data, offsets = columns[0].values.cpu().numpy().tobytes(), columns[0].offsets
        assert offsets is not None
        rows = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        return [self.container(_from_json(json.loads(data[a:b])) for a, b in rows)]


_TUPLE = "\0tuple"


def _to_json(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, list):
        return [_to_json(v) for v in cast("list[Any]", value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_TUPLE: [_to_json(v) for v in cast("tuple[Any, ...]", value)]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in cast("dict[Any, Any]", value)):
        return {k: _to_json(v) for k, v in cast("dict[str, Any]", value).items()}
    raise SchemaError(
        f"holds a {type(value).__name__}; a leaf of plain values takes None, bool, int, float, str, and lists, "
        "tuples and "
        "dicts (with str keys) of them: make it a tensor, or declare it PerBatch()"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in cast("list[Any]", value)]
    if isinstance(value, dict):
        if list(cast("dict[str, Any]", value)) == [_TUPLE]:
            return tuple(_from_json(v) for v in value[_TUPLE])
        return {k: _from_json(v) for k, v in cast("dict[str, Any]", value).items()}
    return value


@dataclass(frozen=True)
class PerBatch:
    """Stays on its rank as it is: what belongs to the batch and not to its samples."""


@dataclass(frozen=True)
class Derived:
    """Computed anew from the balanced batch, such as a batch size or a longest length kept as a plain int."""

    fn: Callable[[Any], Any]
    """Given the batch with its samples, but not yet its derived leaves, in place."""


@dataclass(frozen=True)
class Group:
    """Samples with the same key train on the same rank: shared histories, listwise losses."""

    key: str | Callable[[Any], Tensor]
    """The leaf with the key of each sample, `(B,)` int64, or a function of the batch that gives them."""


# ---- shared ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Like:
    """What a leaf was before it became a tensor of samples."""

    dtype: torch.dtype
    kind: type
    """`np.ndarray`, `Tensor` or a subclass of it."""

    @classmethod
    def of(cls, value: Any) -> "_Like":
        tensor, kind = _tensor(value), type(value)
        kind = np.ndarray if isinstance(value, np.ndarray) else Tensor if kind is torch.nn.Parameter else kind
        return cls(tensor.dtype, kind)

    @classmethod
    def of_all(cls, values: Sequence[Any]) -> list["_Like"]:
        """Of values and of the leaves that say where their rows end."""
        for companion in values[1:]:
            _counts(companion)
        return [cls.of(v) for v in values]

    def restore(self, tensor: Tensor) -> Any:
        tensor = tensor.to(self.dtype)
        if self.kind is np.ndarray:
            return tensor.numpy()
        return tensor if self.kind is Tensor else tensor.as_subclass(self.kind)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value))
        except (TypeError, ValueError) as e:
            raise SchemaError(
                f"is an array of {value.dtype}, which torch does not have: make it a list of plain values, or numbers "
                f"of a native type ({e})"
            ) from None
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized and not value.is_nested:
        value = value.detach().resolve_conj().resolve_neg()
        return value if type(value) is Tensor else value.as_subclass(Tensor)
    what = type(value).__name__
    if isinstance(value, Tensor):
        what = "quantized tensor" if value.is_quantized else f"{value.layout} tensor"
    raise SchemaError(f"must be a dense tensor or a numpy array, got a {what}")


def _counts(value: Any) -> Tensor:
    """Lengths or offsets that stand at another path."""
    if not isinstance(value, Tensor | np.ndarray) or value.ndim != 1:
        what = tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else f"a {type(value).__name__}"
        raise SchemaError(f"must have its lengths or offsets in a tensor or array of one dimension, got {what}")
    return _tensor(value)


def _host(offsets: Tensor) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return offsets.detach().to("cpu", torch.int64).numpy()


def _jagged(values: Tensor, offsets: Tensor) -> Column:
    host = _host(offsets)
    _check_offsets(host, len(values))
    return Column(values.detach(), host)


def _check_offsets(offsets: "np.ndarray[Any, np.dtype[np.int64]]", num_values: int) -> None:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != num_values or (np.diff(offsets) < 0).any():
        ends = f"from {offsets[0]} to {offsets[-1]}" if len(offsets) else "empty"
        raise SchemaError(
            f"has {num_values} values, so its offsets must not decrease and run from 0 to {num_values}; they are {ends}"
        )


def _offsets(column: Column) -> Tensor:
    assert column.offsets is not None
    return torch.from_numpy(column.offsets).to(column.values.device)


def _cumulate(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
