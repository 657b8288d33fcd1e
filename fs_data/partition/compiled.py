"""Loops that numba compiles where it is installed and pays, and that run as numpy and Python elsewhere.

One source serves both, on integers alone, so plans are the same with and without. numba is imported when it is first
needed: that takes a second, and compiling several, once a machine (the result is kept on disk).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

Int = Any
"""An int, or numpy's int64: the loops mix them."""

F = TypeVar("F", bound=Callable[..., Any])

WORTH_COMPILING = 16_384
"""Samples of a global batch. Below it the plain loops take a few milliseconds."""


def quickest(function: F, *helpers: Callable[..., Any], num_samples: int) -> F:
    """`function` for a batch of `num_samples`: itself, or compiled together with the `helpers` that it calls."""
    return function if num_samples < WORTH_COMPILING else cast("F", _compiled(function, helpers))


@cache
def _compiled(function: Callable[..., Any], helpers: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    try:
        import numba  # pyright: ignore[reportMissingImports]
        from numba.extending import register_jitable  # pyright: ignore[reportMissingImports]
    except ImportError:
        return function
    for helper in helpers:
        register_jitable(helper)  # stays a Python function, which compiled ones may call
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(function, nogil=True)
