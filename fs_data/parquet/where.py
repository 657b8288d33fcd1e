"""Predicates: which row groups can hold matching rows, by footers alone, and which columns must be read to tell."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

Term = tuple[str, str, Any]
Where = Sequence[Term] | Sequence[Sequence[Term]]

Bounds = tuple[Any, Any]
"""Least and greatest value that a row group holds."""

_CAN_HOLD: dict[str, Callable[[Any, Any, Any], bool]] = {
    "=": lambda least, most, x: least <= x <= most,
    "==": lambda least, most, x: least <= x <= most,
    "!=": lambda least, most, x: not least == most == x,
    "<": lambda least, most, x: least < x,
    "<=": lambda least, most, x: least <= x,
    ">": lambda least, most, x: most > x,
    ">=": lambda least, most, x: most >= x,
    "in": lambda least, most, x: any(least <= one <= most for one in x),
    "not in": lambda least, most, x: not (least == most and least in x),
}


def alternatives(where: Where) -> list[list[Term]]:
    """`where` as a list of which one must hold, each a list of terms of which all must hold.

    Raises:
        ValueError: Not terms `(column, operator, value)`, or an unknown operator.
    """
    given: list[Any] = list(where)
    parts: list[list[Term]] = [given] if given and isinstance(given[0], tuple) else [list(part) for part in given]
    terms: list[Any] = [term for part in parts for term in part]
    for term in terms:
        if not isinstance(term, tuple) or len(term) != 3 or term[1] not in _CAN_HOLD:
            raise ValueError(
                f"where must hold terms (column, operator, value) with an operator of {list(_CAN_HOLD)}, got {term!r}"
            )
    if not parts or not all(parts):
        raise ValueError("where must hold at least one term; use None to read all rows")
    return parts


def columns_of(parts: Sequence[Sequence[Term]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name, _, _ in part))


def expression(parts: Sequence[Sequence[Term]]) -> Any:
    return pq.filters_to_expression([list(part) for part in parts])


def can_match(parts: Sequence[Sequence[Term]], bounds: Mapping[str, Bounds]) -> bool:
    """False only if no row within `bounds` can match; a column without bounds can hold anything."""
    return any(all(_can_hold(term, bounds.get(term[0])) for term in part) for part in parts)


def _can_hold(term: Term, bounds: Bounds | None) -> bool:
    if bounds is None:
        return True
    try:
        return _CAN_HOLD[term[1]](*bounds, term[2])
    except TypeError:  # values of another type than the column's: the filter itself will say so
        return True
