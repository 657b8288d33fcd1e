"""Arrow columns as tensors, without copies where memory allows, and the rows that cannot become any.

| parquet | batch |
|---|---|
| integers, floats, booleans | `(B,)` |
| decimal | `(B,)` float64 |
| timestamp, time, duration, date | `(B,)` integers in the file's unit |
| string, dictionary of strings | `(B,)` int64: the place in the column's vocabulary |
| fixed_size_list of K | `(B, K)` |
| list, large_list | `JaggedColumn` |
| list of lists | `NestedColumn` |
| struct, list of structs | a column `name.field` for each field |
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from fs_data.jagged import JaggedColumn, NestedColumn
from fs_data.parquet.columns import Column, concatenate

Vocabulary = Sequence[str]


def output_names(kind: Any, name: str) -> list[str]:
    """The batch's columns that a parquet column of type `kind` becomes."""
    if pa.types.is_struct(kind):
        return [out for field in kind for out in output_names(field.type, f"{name}.{field.name}")]
    return output_names(kind.value_type, name) if _is_list(kind) or _is_array(kind) else [name]


def why_not(kind: Any, name: str, vocabularies: Mapping[str, Vocabulary], depth: int = 0) -> str | None:
    """What about `kind` cannot become tensors; None if all can."""
    if pa.types.is_struct(kind):
        reasons = (why_not(f.type, f"{name}.{f.name}", vocabularies, depth) for f in kind)
        return next((r for r in reasons if r), None)
    if _is_list(kind):
        if depth == 2:
            return "lists may be two levels deep"
        return why_not(kind.value_type, name, vocabularies, depth + 1)
    if _is_array(kind):
        if _is_list(kind.value_type) or pa.types.is_struct(kind.value_type):
            return "a list of fixed size must hold numbers"
        return why_not(kind.value_type, name, vocabularies, depth)
    leaf = kind.value_type if pa.types.is_dictionary(kind) else kind
    if _is_text(leaf):
        return None if name in vocabularies else f"texts need a vocabulary: vocabularies={{{name!r}: […]}}"
    is_number = pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf)
    if is_number or pa.types.is_decimal(leaf) or pa.types.is_temporal(leaf) or pa.types.is_null(leaf):
        return None
    return "must hold integers, floats or booleans, decimals, times, texts with a vocabulary, or lists of them"


def faulty_rows(chunked: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> NDArray[np.int64]:
    """Sorted rows with a null, a null element, or a text outside its vocabulary."""
    found = [np.zeros(0, np.int64)]
    first = 0
    for chunk in chunked.chunks:
        found.append(first + _faults(chunk, name, vocabularies))
        first += len(chunk)
    return np.concatenate(found)


def fault_of(row: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> str:
    """What is wrong with a faulty row, an array of length 1, and what to do about it."""
    if row.null_count:
        return "must not be null; write an empty list"
    return _fault_of_element(row, name, vocabularies) or "must not hold a null element; leave it out"


def to_columns(chunked: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Column]:
    """The batch's columns of one parquet column (`pa.ChunkedArray`) that has no faulty rows."""
    chunks = chunked.chunks or [pa.array([], chunked.type)]
    parts = [_columns(chunk, name, vocabularies) for chunk in chunks]
    return {out: concatenate([part[out] for part in parts]) for out in parts[0]}


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_array(kind: Any) -> bool:
    return pa.types.is_fixed_size_list(kind)


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _items(array: Any) -> tuple[Any, Any]:
    """Values of a list array and offsets into them; unlike `.values`, offsets respect slices."""
    offsets = array.offsets.to_numpy()
    start, stop = int(offsets[0]), int(offsets[-1])
    return array.values.slice(start, stop - start), offsets - start if start else offsets


def _faults(array: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> NDArray[np.int64]:
    kind = array.type
    if pa.types.is_struct(kind):
        # flatten() gives a null struct's fields as nulls, unlike field().
        fields = [_faults(a, f"{name}.{f.name}", vocabularies) for f, a in zip(kind, array.flatten(), strict=True)]
        return np.unique(np.concatenate([_nulls(array), *fields]))
    if _is_list(kind):
        values, offsets = _items(array)
        inner = _faults(values, name, vocabularies)
        of_items = np.searchsorted(offsets, inner, side="right") - 1
        return np.unique(np.concatenate([_nulls(array), of_items])) if len(inner) or array.null_count else inner
    if _is_array(kind):
        inner = _faults(_fixed_values(array), name, vocabularies) // kind.list_size
        return np.unique(np.concatenate([_nulls(array), inner])) if len(inner) or array.null_count else inner
    return _nulls(_leaf(array, name, vocabularies))


def _fault_of_element(array: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> str | None:
    """Of the first text that is outside its vocabulary; None where there is none."""
    kind = array.type
    if pa.types.is_struct(kind):
        fields = zip(kind, array.flatten(), strict=True)
        return next((why for f, a in fields if (why := _fault_of_element(a, f"{name}.{f.name}", vocabularies))), None)
    if _is_list(kind) or _is_array(kind):
        values = _items(array)[0] if _is_list(kind) else _fixed_values(array)
        return _fault_of_element(values, name, vocabularies)
    unknown = array.drop_null().filter(_leaf(array.drop_null(), name, vocabularies).is_null())
    if not len(unknown):
        return None
    return f"must not hold {unknown[0].as_py()!r}, a text outside vocabularies[{name!r}]; add it"


def _nulls(array: Any) -> NDArray[np.int64]:
    if not array.null_count:
        return np.zeros(0, np.int64)
    return np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))


def _fixed_values(array: Any) -> Any:
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _columns(array: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Column]:
    kind = array.type
    if pa.types.is_struct(kind):
        out: dict[str, Column] = {}
        for field, values in zip(kind, array.flatten(), strict=True):
            out |= _columns(values, f"{name}.{field.name}", vocabularies)
        return out
    if _is_list(kind):
        values, offsets = _items(array)
        rows = torch.from_numpy(np.array(offsets, np.int64))
        return {out: _wrapped(column, rows) for out, column in _columns(values, name, vocabularies).items()}
    if _is_array(kind):
        values = _tensor(_leaf(_fixed_values(array), name, vocabularies))
        return {name: values.reshape(len(array), kind.list_size)}
    return {name: _tensor(_leaf(array, name, vocabularies))}


def _wrapped(column: Column, offsets: Tensor) -> Column:
    if isinstance(column, Tensor):
        return JaggedColumn(column, offsets)
    assert isinstance(column, JaggedColumn)
    return NestedColumn(column.values, column.offsets, offsets)


def _leaf(array: Any, name: str, vocabularies: Mapping[str, Vocabulary]) -> Any:
    """`array` as one of numbers or booleans."""
    if pa.types.is_dictionary(array.type):
        # The indices alone would mean another thing in each row group.
        array = array.dictionary_decode()
    kind = array.type
    if _is_text(kind):
        places = pc.index_in(array, value_set=pa.array(vocabularies[name], kind))  # type: ignore[attr-defined]
        return places.cast(pa.int64())
    if pa.types.is_decimal(kind):
        return array.cast(pa.float64())
    if pa.types.is_temporal(kind):
        return array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    return array.cast(pa.int64()) if pa.types.is_null(kind) else array


def _tensor(array: Any) -> Tensor:
    if pa.types.is_boolean(array.type):  # bits, which tensors cannot share
        return torch.from_numpy(array.to_numpy(zero_copy_only=False))
    return torch.from_dlpack(array)
