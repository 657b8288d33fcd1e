"""Predicates: which row groups can hold matching rows, by footers alone, and which columns must be read to tell."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Term = tuple[str, str, Any]
Where = Sequence[Term] | Sequence[Sequence[Term]]


class Bounds(NamedTuple):
    """What a row group holds of a column."""

    least: Any
    most: Any
    has_nulls: bool
    """Or may have some."""

    def is_all(self, x: Any) -> bool:
        """Whether all that is not null surely is `x`; bounds of floats do not tell of NaN."""
        return bool(self.least == self.most == x) and not isinstance(self.least, float)


_CAN_HOLD: dict[str, Callable[[Bounds, Any], bool]] = {
    "=": lambda b, x: b.least <= x <= b.most,
    "==": lambda b, x: b.least <= x <= b.most,
    "!=": lambda b, x: not b.is_all(x),
    "<": lambda b, x: b.least < x,
    "<=": lambda b, x: b.least <= x,
    ">": lambda b, x: b.most > x,
    ">=": lambda b, x: b.most >= x,
    "in": lambda b, x: any(b.least <= one <= b.most or one != one for one in x),
    # Arrow lets a null pass as well, as it is none of the values.
    "not in": lambda b, x: b.has_nulls or not any(b.is_all(one) for one in x),
}


def alternatives(where: Where) -> list[list[Term]]:
    """`where` as a list of which one must hold, each a list of terms of which all must hold; their values are plain.

    Raises:
        ValueError: Not terms `(column, operator, value)`, an unknown operator, or a value that it cannot take.
    """
    given: list[Any] = list(where)
    parts: list[Any] = [given] if given and _looks_like_term(given[0]) else given
    if not parts or not all(isinstance(part, (list, tuple)) and part for part in parts):
        raise ValueError(
            f"where must be a list of at least one term (column, operator, value), or of lists of such, got {where!r}; "
            "use None to read all rows"
        )
    return [[_term(term) for term in part] for part in parts]


def columns_of(parts: Sequence[Sequence[Term]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name, _, _ in part))


def expression(parts: Sequence[Sequence[Term]]) -> Any:
    return reduce(or_, (reduce(and_, map(_expression_of, part)) for part in parts))


def described(parts: Sequence[Sequence[Term]]) -> str:
    """The same text for the same predicate, in each process; a long one ends with a checksum in place of its values."""
    text = repr(tuple(map(tuple, parts)))
    if len(text) <= 500:
        return text
    return f"{text[:400]}… ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def check_types(parts: Sequence[Sequence[Term]], types: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: A term whose value cannot be compared with its column of that type.
    """
    for term in (term for part in parts for term in part):
        name, kind = term[0], types[term[0]]
        try:
            pa.table({name: pa.nulls(1, kind)}).filter(expression([[term]]))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            got = described([[term]])
            raise ValueError(
                f"where must compare column {name!r} with values of its type, {kind}, got {got}: {error}"
            ) from error


def can_match(parts: Sequence[Sequence[Term]], bounds: Mapping[str, Bounds]) -> bool:
    """False only if no row within `bounds` can match; a column without bounds can hold anything."""
    return any(all(_can_hold(term, bounds.get(term[0])) for term in part) for part in parts)


def _can_hold(term: Term, bounds: Bounds | None) -> bool:
    if bounds is None:
        return True
    try:
        return _CAN_HOLD[term[1]](bounds, term[2])
    except TypeError:  # values that only Arrow can compare
        return True


def _looks_like_term(given: Any) -> bool:
    return isinstance(given, tuple) and bool(given) and isinstance(given[0], str)


def _expression_of(term: Term) -> Any:
    name, operator, value = term
    if operator not in ("in", "not in"):
        return pq.filters_to_expression([term])
    if all(v is None for v in value):  # to Arrow of type null, with which not every column can be compared
        is_in = pc.field(name).is_null() if value else pc.scalar(False)
    else:
        # Arrow looks for the bits of a number, and zero has two floats.
        is_in = pc.field(name).isin([*value, *(-v for v in value if isinstance(v, float) and v == 0.0)])
    return is_in if operator == "in" else ~is_in


def _term(given: Any) -> Term:
    if not _looks_like_term(given) or len(given) != 3 or given[1] not in _CAN_HOLD:
        raise ValueError(
            f"where must hold terms (column, operator, value) with an operator of {list(_CAN_HOLD)}, got {given!r}"
        )
    name, operator, value = given
    if operator in ("in", "not in"):
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise ValueError(f"where must give {operator!r} a list of values, got {given!r}")
        by_text = {repr(v): v for v in map(_plain, value)}
        return name, operator, [by_text[text] for text in sorted(by_text)]  # that of a set depends on the process
    if value is None:
        raise ValueError(f"where cannot compare with None, got {given!r}; ask by 'in' [None], or 'not in' [None]")
    return name, operator, _plain(value)


def _plain(value: Any) -> Any:
    is_number = isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64))
    return value.item() if is_number else value
