"""Jagged copies under `torch.compile`: whole graphs, fake tensors, and the dispatcher's own checks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fs_kernels as k
from tests.fs_kernels.jagged import DEVICE, ON_GPU, offsets_of

pytest.importorskip("triton", reason="needs triton: pip install 'freescale[triton]'")
pytestmark = ON_GPU


def example(*, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    values = torch.randn(6, 3, device=DEVICE, requires_grad=requires_grad)
    return values, offsets_of([1, 0, 3, 2]), torch.tensor([2, 0, 3, 2], device=DEVICE)


def permute(values: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
    return k.jagged_permute(values * 2, offsets, index, out_size=9)[0] + 1


def transpose(values: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
    return k.keyed_transpose(values * 2, offsets, 2)[0] + 1


@pytest.mark.parametrize("run", [permute, transpose])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_gives_the_values_and_gradients_of_eager_mode(run: Callable[..., Tensor], dynamic: bool) -> None:
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    found: list[tuple[Tensor, Tensor]] = []
    for f in (run, compiled):
        values, offsets, index = example(requires_grad=True)
        out = f(values, offsets, index)
        (grad,) = torch.autograd.grad((out * out).sum(), values)
        found.append((out.detach(), grad))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("name", ["jagged_permute", "keyed_transpose"])
def test_the_operations_keep_the_dispatchers_rules(name: str, impl: k.Impl) -> None:
    values, offsets, index = example(requires_grad=True)
    op = getattr(torch.ops.fs_kernels, name).default
    arguments = {"jagged_permute": (values, offsets, index, 9, impl), "keyed_transpose": (values, offsets, 2, impl)}
    torch.library.opcheck(op, arguments[name])


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_runs_an_operation_for_each_and_forward_derivatives_are_refused(impl: k.Impl) -> None:
    values, offsets, _ = example(requires_grad=False)

    def total(values: Tensor) -> Tensor:
        return k.segment_sum(values, offsets, impl=impl)

    both = torch.vmap(total)(torch.stack([values, values * 2]))
    torch.testing.assert_close(both, torch.stack([total(values), total(values) * 2]), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="segment_sum has no forward-mode derivative"):
        torch.func.jvp(total, (values,), (values,))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_unknown_size_is_a_dynamic_one() -> None:
    values, offsets, index = example(requires_grad=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda v: k.jagged_permute(v, offsets, index)[0], fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(values), k.jagged_permute(values, offsets, index)[0], rtol=0, atol=0)
