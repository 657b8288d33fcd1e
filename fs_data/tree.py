"""The shape of a batch: which containers hold its leaves, so that a batch of the same type can be built around others.

Containers are dicts, lists, tuples, named tuples, dataclasses, TensorDicts, and any object whose attributes can be set.
A leaf is known by its path: the keys, indices and attribute names on the way to it, joined by dots.
"""

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

Children = list[tuple[str, object]]

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, type)


@dataclass(frozen=True)
class Node(ABC):
    """A container: builds one of its kind around other children."""

    names: tuple[str, ...]
    children: tuple["Tree", ...]

    @abstractmethod
    def build(self, children: list[Any], num_samples: int) -> Any: ...


Tree = Node | str | tuple[object]
"""A container, the path of a leaf, or `(value,)`: a value that stays on its rank."""


@dataclass(frozen=True)
class _MappingNode(Node):
    template: Any
    keys: tuple[Any, ...]

    def build(self, children: list[Any], num_samples: int) -> Any:
        out = copy.copy(self.template)
        out.update(zip(self.keys, children, strict=True))
        return out


@dataclass(frozen=True)
class _SequenceNode(Node):
    make: type

    def build(self, children: list[Any], num_samples: int) -> Any:
        return self.make(*children) if hasattr(self.make, "_fields") else self.make(children)


@dataclass(frozen=True)
class _ObjectNode(Node):
    template: Any

    def build(self, children: list[Any], num_samples: int) -> Any:
        out = copy.copy(self.template)
        for name, child in zip(self.names, children, strict=True):
            object.__setattr__(out, name, child)  # frozen dataclasses refuse setattr
        return out


@dataclass(frozen=True)
class _TensorDictNode(Node):
    make: type
    batch_dims: tuple[int, ...]
    """All but the first."""

    def build(self, children: list[Any], num_samples: int) -> Any:
        source = dict(zip(self.names, children, strict=True))
        return self.make(source, batch_size=[num_samples, *self.batch_dims])


def children_of(value: object) -> Children | None:
    """The named parts of a container; None for anything else."""
    if is_tensor_like(value) or isinstance(value, _PLAIN):
        return None
    if _is_tensordict(value):
        return [(str(k), v) for k, v in cast("Any", value).items()]
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in cast("Mapping[object, object]", value).items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(cast("Any", value)._fields, cast("tuple[object, ...]", value), strict=True))
    if isinstance(value, list | tuple):
        return [(str(i), v) for i, v in enumerate(cast("list[object]", value))]
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return list(vars(value).items()) if hasattr(value, "__dict__") else None


def build_tree(value: object, is_leaf: Callable[[str, object], bool], path: str = "") -> Tree:
    """The tree of `value`, with the paths for which `is_leaf(path, value)` as leaves."""
    if path and is_leaf(path, value):
        return path
    found = children_of(value)
    if found is None:
        return (value,)
    names = tuple(name for name, _ in found)
    nodes = tuple(build_tree(child, is_leaf, join_path(path, name)) for name, child in found)
    if _is_tensordict(value):
        return _TensorDictNode(names, nodes, type(value), tuple(cast("Any", value).batch_size[1:]))
    if isinstance(value, Mapping):
        template = copy.copy(cast("Any", value))
        template.clear()
        return _MappingNode(names, nodes, template, tuple(cast("Mapping[object, object]", value)))
    if isinstance(value, list | tuple):
        return _SequenceNode(names, nodes, type(cast("list[object]", value)))
    template = copy.copy(value)
    for name in names:
        object.__setattr__(template, name, None)  # the template must not keep a batch alive
    return _ObjectNode(names, nodes, template)


def fill(tree: Tree, leaves: Mapping[str, Any], num_samples: int) -> Any:
    """The batch that `tree` is the shape of, with `leaves` by path."""
    if isinstance(tree, str):
        return leaves[tree]
    if isinstance(tree, tuple):
        return tree[0]
    return tree.build([fill(child, leaves, num_samples) for child in tree.children], num_samples)


def describe(tree: Tree) -> str:
    """The containers' types and the leaves' paths as text, the same on ranks whose batches have the same shape."""
    if isinstance(tree, str):
        return tree
    if isinstance(tree, tuple):
        return f"={type(tree[0]).__name__}"
    kind = type(getattr(tree, "template", None)) if not hasattr(tree, "make") else cast("Any", tree).make
    inside = ", ".join(f"{n}: {describe(c)}" for n, c in zip(tree.names, tree.children, strict=True))
    return f"{kind.__name__}({inside})"


def walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """All parts of `value` with their paths, containers before what they hold."""
    if path:
        yield path, value
    for name, child in children_of(value) or []:
        yield from walk(child, join_path(path, name))


def join_path(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def tensor_in(value: object) -> Tensor | None:
    """A tensor itself, or the values of a jagged container; None for what holds no tensor directly."""
    if isinstance(value, Tensor):
        return value
    values = getattr(value, "values", None)
    if callable(values) and type_name(value) in _JAGGED:
        values = values()
    return values if isinstance(values, Tensor) else None


def is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN)


def is_tensor_like(value: object) -> bool:
    """Whether a value is a leaf by its type: tensors, arrays and jagged containers."""
    return isinstance(value, Tensor | np.ndarray) or type_name(value) in _JAGGED


_JAGGED = ("JaggedColumn", "NestedColumn", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")


def type_name(value: object) -> str:
    """The name of the first known jagged type among a value's bases: TorchRec need not be installed to ask."""
    return next((c.__name__ for c in type(value).__mro__ if c.__name__ in _JAGGED), type(value).__name__)


def _is_tensordict(value: object) -> bool:
    return any(c.__name__ == "TensorDictBase" for c in type(value).__mro__)
