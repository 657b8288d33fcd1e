"""Which implementation runs: the torch reference, or the Triton kernel beside it."""

import os
from typing import Literal, get_args

from torch import Tensor

Impl = Literal["auto", "triton", "reference"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it once, at import


def resolve_impl(impl: Impl, x: Tensor) -> Literal["triton", "reference"]:
    """`"auto"` goes by the device of `x`; an explicit request is honoured or refused, not swapped."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {get_args(Impl)}, got {impl!r}")
    if impl == "auto":
        return "triton" if x.is_cuda else "reference"
    if impl == "triton" and not (x.is_cuda or INTERPRET):
        raise ValueError(
            f"impl='triton' needs CUDA tensors, got one on {x.device}; "
            "use impl='reference', or set TRITON_INTERPRET=1 to debug on the CPU"
        )
    return impl
