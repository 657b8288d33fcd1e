"""Operations as torch sees them: registered with the dispatcher, so that `torch.compile` and autograd know them.

Registered through `torch.library.Library` rather than `custom_op`, whose checks cost several microseconds a call; and
where nothing that the dispatcher is for is at work, it is left out, since it costs as much as a kernel's launch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("fs_kernels", "DEF")


def register(
    schema: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """The operation `torch.ops.fs_kernels.<name>`, for all devices.

    Args:
        schema: As `name(Tensor x, int? n, str impl) -> Tensor`; arguments that are changed in place are `Tensor(a!)`.
        run: Computes it; takes what the schema says, by position.
        fake: The same for tensors without data: returns empty outputs of the right shape, dtype and device.
        backward: `backward(ctx, *grads)` returns a gradient, or None, for each argument.
        setup_context: `setup_context(ctx, inputs, output)` saves what `backward` needs.

    Returns:
        A function that takes what `run` does.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fs_kernels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"fs_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    op = getattr(torch.ops.fs_kernels, name).default

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*args)
        # The dispatcher would drop them in silence.
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):  # pyright: ignore[reportPrivateUsage]
            raise NotImplementedError(f"{name} has no forward-mode derivative; use backward()")
        if _has_transforms() or not all(map(_is_plain, args)):
            return op(*args)
        return run(*args)

    return call


def _has_transforms() -> bool:
    """Whether a mode or a transform of torch.func, such as `vmap`, is at work."""
    return (
        torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage]
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    )


def _has_tangent(x: Any) -> bool:
    if isinstance(x, Tensor):
        return forward_ad.unpack_dual(x).tangent is not None
    return isinstance(x, list) and any(map(_has_tangent, x))


def _is_plain(x: Any) -> bool:
    """Whether neither autograd nor a subclass of Tensor, such as those without data, has a part in `x`."""
    if isinstance(x, Tensor):
        return type(x) is Tensor and not x.requires_grad
    return not isinstance(x, list) or all(map(_is_plain, x))
