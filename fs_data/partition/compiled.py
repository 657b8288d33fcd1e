"""Loops that numba compiles where it is installed, and that run as numpy and Python where it is not.

One source serves both, on integers alone, so plans are the same with and without. Modules that use `compiled` import
numba, which takes most of a second: partitioners import them when they plan, not before.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

Int = Any
"""An int, or numpy's int64: the loops mix them."""

F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba  # pyright: ignore[reportMissingImports]
except ImportError:
    numba = None


def compiled(function: F) -> F:
    """`function` itself, or numba's version of it, kept on disk between processes where there is a place for it."""
    if numba is None:
        return function
    try:
        return cast("F", numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # no folder to write to
        return cast("F", numba.njit(function, nogil=True))
