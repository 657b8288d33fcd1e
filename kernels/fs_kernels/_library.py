"""Operations as torch sees them: registered with the dispatcher, so that `torch.compile` and autograd know them.

Registered through `torch.library.Library` rather than `custom_op`, whose checks cost several microseconds a call.
"""

from collections.abc import Callable
from typing import Any

import torch

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
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fs_kernels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"fs_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.fs_kernels, name).default
