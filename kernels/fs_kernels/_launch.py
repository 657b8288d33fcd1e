"""Launching Triton kernels without working out at every launch which code they were compiled to.

At a launch Triton looks at every argument for its type, and whether it is 1 or divisible by 16, since it compiles code
of its own for each such case. That takes longer than the launch itself, and small inputs are all launches. The kernels
here are compiled for any value of their arguments, so that few words tell which code it is.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fs_kernels._dispatch import INTERPRET

_compiled: dict[tuple[object, ...], Any] = {}


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel whose code depends on its `tl.constexpr` parameters, the last ones, and types alone."""
    names = [n for n, p in inspect.signature(function).parameters.items() if p.annotation is not tl.constexpr]
    compile_lazily: Any = triton.jit  # its overloads take one kind of iterable or the other, by version
    return compile_lazily(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


def launch(
    kernel: Any,
    num_programs: int,
    args: tuple[object, ...],
    constants: tuple[object, ...],
    *,
    device: torch.device,
    variant: tuple[object, ...] = (),
    num_warps: int = 4,
    fuse: bool = True,
) -> None:
    """Runs a `jit` kernel on `device`.

    Args:
        num_programs: At least 1.
        args: The parameters that are known at the launch. Integers must be annotated as `tl.int64`.
        constants: The `tl.constexpr` ones that follow.
        variant: Where `args` of different calls differ in type: the dtypes, which of them are None, and for tensors in
            tuples whether they are aligned to 16 bytes.
        fuse: Whether a product and the addition that follows may be rounded once.
    """
    if INTERPRET:
        kernel[(num_programs,)](*args, *constants)
        return
    index = torch.cuda.current_device()
    if device.index != index:
        with torch.cuda.device(device):
            launch(
                kernel, num_programs, args, constants,
                device=device, variant=variant, num_warps=num_warps, fuse=fuse,
            )  # fmt: skip
        return
    key = (id(kernel), index, constants, variant)
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(num_programs,)](*args, *constants, num_warps=num_warps, enable_fp_fusion=fuse)
    else:
        compiled[(num_programs, 1, 1)](*args, *constants)
