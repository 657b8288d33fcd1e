"""The shape of a batch: which containers hold its leaves, so that a batch of the same type can be built around others.

Containers are dicts, lists, tuples, named tuples, dataclasses, TensorDicts, and any object whose attributes can be set.
A leaf is known by its path: the keys, indices and attribute names on the way to it, joined by dots. A batch that is a
leaf itself has the path "".
"""

import copy
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fs_data.errors import SchemaError

Children = list[tuple[str, object]]

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, type, Enum)


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
        out = _copy_mapping(self.template)
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
    batch_size: tuple[int, ...]

    def build(self, children: list[Any], num_samples: int) -> Any:
        source = dict(zip(self.names, children, strict=True))
        batch_size = [num_samples, *self.batch_size[1:]] if self.batch_size else []
        if _is_tensorclass(self.make):
            return self.make(**source, batch_size=batch_size)
        return self.make(source, batch_size=batch_size)


@dataclass(frozen=True)
class _Whole(Node):
    """Stays on its rank, whatever it is, and is not looked into."""

    value: object

    def build(self, children: list[Any], num_samples: int) -> Any:
        return self.value


def children_of(value: object) -> Children | None:
    """The named parts of a container; None for anything else."""
    if is_tensor_like(value) or isinstance(value, _PLAIN):
        return None
    if type(value).__name__ == "LazyStackedTensorDict":
        return None
    if _is_tensordict(value):
        return [(str(k), _plain_value(v)) for k, v in cast("Any", value).items()]
    if isinstance(value, Mapping):
        return [(str(k), v) for k, v in cast("Mapping[object, object]", value).items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(cast("Any", value)._fields, cast("tuple[object, ...]", value), strict=True))
    if isinstance(value, list | tuple):
        return [(str(i), v) for i, v in enumerate(cast("list[object]", value))]
    return _attributes(value)


def _attributes(value: object) -> Children | None:
    """What an object holds, but for cached properties, which are to be computed anew; None if it holds nothing."""
    kind = type(value)
    names: list[str] = []
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [a.name for a in cast("Any", kind).__attrs_attrs__]
    elif not hasattr(value, "__dict__"):
        return None
    for c in kind.__mro__:
        slots = c.__dict__.get("__slots__", ())
        names += [s for s in ([slots] if isinstance(slots, str) else slots) if not s.startswith("__")]
    names += getattr(value, "__dict__", ())
    return [
        (name, getattr(value, name))
        for name in dict.fromkeys(names)
        if not _is_cached_property(kind, name) and hasattr(value, name)
    ]


def _is_cached_property(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)


def build_tree(
    value: object,
    is_leaf: Callable[[str, object], bool],
    path: str = "",
    *,
    whole: Collection[str] = (),
    within: tuple[int, ...] = (),
) -> Tree:
    """The tree of `value`, with the paths for which `is_leaf(path, value)` as leaves.

    What holds no leaf stays as it is, and is not even copied; the paths `whole` are not looked into.
    """
    if path in whole:
        return _Whole((), (), value)
    if is_leaf(path, value):
        return path
    found = children_of(value)
    if found is None or id(value) in within:
        return (value,)
    names = tuple(name for name, _ in found)
    within = (*within, id(value))
    nodes = tuple(
        build_tree(child, is_leaf, join_path(path, name), whole=whole, within=within) for name, child in found
    )
    if path and not any(isinstance(n, str | Node) for n in nodes):
        return (value,)
    if _is_tensordict(value):
        return _TensorDictNode(names, nodes, type(value), tuple(cast("Any", value).batch_size))
    if isinstance(value, Mapping):
        _check_no_tensor_beside(cast("Any", value), path)
        template = _copy_mapping(cast("Any", value))
        template.clear()
        return _MappingNode(names, nodes, template, tuple(cast("Mapping[object, object]", value)))
    if isinstance(value, list | tuple):
        return _SequenceNode(names, nodes, type(cast("list[object]", value)))
    template = copy.copy(value)
    for name in names:
        object.__setattr__(template, name, None)  # the template must not keep a batch alive
    for name in [n for n in getattr(template, "__dict__", ()) if _is_cached_property(type(value), n)]:
        del template.__dict__[name]
    return _ObjectNode(names, nodes, template)


def _copy_mapping(value: Any) -> Any:
    out = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # items that are attributes too, by the usual trick
        out.__dict__ = out
    return out


def _check_no_tensor_beside(value: Any, path: str) -> None:
    """A dict's attributes are not exchanged: they would be those of other samples than its items."""
    attributes = getattr(value, "__dict__", {})
    beside = [n for n, v in attributes.items() if is_tensor_like(v) and n not in value]
    if beside:
        where = f"leaf '{path}'" if path else "the batch"
        raise SchemaError(
            f"{where}, a {type(value).__name__}, has tensors in its attributes {beside}, beside its items: make them "
            "items, so that they are exchanged with their samples"
        )


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
    if isinstance(tree, _Whole):
        return "per batch"
    kind = type(getattr(tree, "template", None)) if not hasattr(tree, "make") else cast("Any", tree).make
    inside = ", ".join(f"{n}: {describe(c)}" for n, c in zip(tree.names, tree.children, strict=True))
    return f"{kind.__name__}({inside})"


def walk(
    value: object, path: str = "", *, whole: Collection[str] = (), within: tuple[int, ...] = ()
) -> Iterator[tuple[str, object]]:
    """All parts of `value` with their paths, containers before what they hold; `whole` are not looked into."""
    yield path, value
    if path in whole or id(value) in within:
        return
    for name, child in children_of(value) or []:
        yield from walk(child, join_path(path, name), whole=whole, within=(*within, id(value)))


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
    return any(c.__name__ == "TensorDictBase" for c in type(value).__mro__) or _is_tensorclass(type(value))


def _is_tensorclass(kind: type) -> bool:
    return bool(getattr(kind, "_is_tensorclass", False))


def _plain_value(value: Any) -> object:
    """What a TensorDict wraps that is no tensor: one value of the batch, or a list with one of each sample."""
    name = type(value).__name__
    return list(value.tolist()) if name == "NonTensorStack" else value.data if name == "NonTensorData" else value
