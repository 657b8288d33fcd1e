"""What a batch consists of, declared or inferred, so that it can be taken apart into samples and put together again.

`BatchSchema` is what a user declares; bound to a first batch it gives a `BoundSchema`, which knows every leaf.
"""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fs_data.column import Column, ColumnSpec
from fs_data.errors import SchemaError
from fs_data.leaves import Dense, Derived, Form, Group, Jagged, Keyed, Kind, Nested, Objects, PerBatch
from fs_data.tree import (
    Tree,
    build_tree,
    children_of,
    describe,
    fill,
    is_plain,
    is_tensor_like,
    join_path,
    tensor_in,
    type_name,
    walk,
)

Declared = Kind | PerBatch | Derived

_BY_TYPE: dict[str, Kind] = {
    "JaggedColumn": Jagged(),
    "JaggedTensor": Jagged(),
    "NestedColumn": Nested(),
    "KeyedJaggedTensor": Keyed(),
}


class BatchSchema:
    """Says how the leaves of a batch split into samples; leaves that are not declared are inferred.

    Args:
        leaves: Kinds by path: keys, indices and attribute names joined by dots, as in
            `{"user.ids": Jagged(lengths="user.n")}`. Companions (`lengths=`, …) are looked for beside the leaf first,
            then from the top.
        group: Samples with the same key stay together (see `Group`).
    """

    def __init__(
        self,
        leaves: Mapping[str, Declared] | None = None,
        *,
        group: Group | str | Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.leaves = dict(leaves or {})
        self.group = group if isinstance(group, Group) or group is None else Group(group)
        for path, kind in self.leaves.items():
            if not isinstance(kind, Kind | PerBatch | Derived):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"leaf '{path}' must be declared as Dense(), Jagged(), PerBatch(), …; got {kind!r}")

    def bind(self, batch: object) -> "BoundSchema":
        """The schema of batches like `batch`; raises SchemaError, which names the leaf, where a kind is not clear."""
        return _Binder(self, batch).bind()

    def bind_to(self, tree: Tree, leaves: "tuple[BoundLeaf, ...]") -> "BoundSchema":
        """The schema whose tree and leaves another rank found."""
        derived = {path: kind.fn for path, kind in self.leaves.items() if isinstance(kind, Derived)}
        return BoundSchema(tree, leaves, derived, self.per_batch, self.group)

    @property
    def per_batch(self) -> frozenset[str]:
        return frozenset(path for path, kind in self.leaves.items() if isinstance(kind, PerBatch))


@dataclass(frozen=True)
class BoundLeaf:
    paths: tuple[str, ...]
    """Where the leaf is, and its companions."""
    types: tuple[type, ...]
    """Of the values at `paths`."""
    form: Form
    specs: tuple[ColumnSpec, ...]
    is_history: bool
    """Whether the lengths of its rows say how much work a sample is."""
    has_candidates: bool
    declared: bool


@dataclass(frozen=True)
class Split:
    """A batch taken apart."""

    columns: list[Column]
    num_samples: int
    tree: Tree


@dataclass
class BoundSchema:
    tree: Tree
    """Of the first batch, for ranks that have no batch of their own."""
    leaves: tuple[BoundLeaf, ...]
    derived: dict[str, Callable[[Any], Any]]
    per_batch: frozenset[str]
    group: Group | None
    _last: dict[str, "weakref.ref[object]"] = field(default_factory=dict[str, "weakref.ref[object]"], repr=False)

    @property
    def specs(self) -> list[ColumnSpec]:
        return [spec for leaf in self.leaves for spec in leaf.specs]

    @property
    def description(self) -> str:
        """One line a leaf; equal on ranks that can exchange samples."""
        lines = [describe(self.tree)]
        lines += [f"{' + '.join(leaf.paths)}: {leaf.form!r} {[_say(s) for s in leaf.specs]}" for leaf in self.leaves]
        lines += [f"{path}: derived" for path in self.derived]
        return "\n".join(lines)

    @property
    def fingerprint(self) -> int:
        """A hash of the description, 63 bits and never 0."""
        return int.from_bytes(hashlib.blake2b(self.description.encode(), digest_size=8).digest(), "little") >> 1 | 1

    def split(self, batch: object) -> Split:
        """`batch` as columns, one or more a leaf in the order of `leaves`; views of its memory where possible."""
        found: dict[str, Any] = {}
        paths = self._paths

        def is_leaf(path: str, value: object) -> bool:
            if path in paths:
                found[path] = value
            return path in paths

        tree = build_tree(batch, is_leaf, whole=self.per_batch)
        self._check_shape(tree)
        columns: list[Column] = []
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            values = [found[p] for p in leaf.paths]
            self._check_not_shared(leaf, values[0])
            columns += self._columns(leaf, values)
            sizes[leaf.paths[0]] = columns[-1].num_samples
        num_samples = next(iter(sizes.values()))
        for path, size in sizes.items():
            if size != num_samples:
                raise SchemaError(
                    f"all leaves of a batch must have the same number of samples: '{path}' has {size}, "
                    f"'{self.leaves[0].paths[0]}' has {num_samples}; if '{path}' does not belong to the samples, "
                    f"declare BatchSchema({{'{path}': PerBatch()}})"
                )
        return Split(columns, num_samples, tree)

    def join(self, columns: Sequence[Column], tree: Tree | None = None) -> Any:
        """The batch of `columns`; what stays on a rank, such as PerBatch leaves, is taken from `tree`."""
        num_samples, values = columns[0].num_samples, dict[str, Any]()
        rest = iter(columns)
        for leaf in self.leaves:
            mine = [next(rest) for _ in leaf.specs]
            values.update(zip(leaf.paths, leaf.form.join(mine), strict=True))
        tree = self.tree if tree is None else tree
        if not self.derived:
            return fill(tree, values, num_samples)
        batch = fill(tree, values | dict.fromkeys(self.derived), num_samples)
        for path, fn in self.derived.items():
            values[path] = fn(batch)
        return fill(tree, values, num_samples)

    def tensor_of(self, batch: object) -> "Tensor | NDArray[Any] | None":
        """A tensor or array that holds samples of this batch and of no other; None if it has none."""
        paths = self._paths
        for path, value in walk(batch, whole=self.per_batch):
            if path in paths:
                first = cast("list[object]", value)[0] if isinstance(value, list) and value else value
                tensor = first if isinstance(first, np.ndarray) else tensor_in(first)
                if tensor is not None:
                    return cast("Tensor | NDArray[Any]", tensor)
        return None

    def forget_batches(self) -> None:
        """A new pass may begin with the batch that the last one ended with."""
        self._last.clear()

    def history_lengths(self, split: Split) -> NDArray[np.int64]:
        """`(B,)`: the longest row of each sample over all jagged leaves; 1 where the batch has none."""
        longest = np.zeros(split.num_samples, np.int64)
        rest, seen = iter(split.columns), False
        for leaf in self.leaves:
            mine = [next(rest) for _ in leaf.specs]
            if leaf.is_history:
                longest, seen = np.maximum(longest, mine[0].lengths.max(0)), True
        return longest if seen else np.ones(split.num_samples, np.int64)

    def candidates(self, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`(B,)` candidates of each sample, and the `(C,)` lengths of their content, of the first Nested leaf."""
        rest = iter(split.columns)
        for leaf in self.leaves:
            mine = [next(rest) for _ in leaf.specs]
            if leaf.has_candidates:
                return mine[0].lengths[0], mine[0].values.cpu().numpy()
        return np.zeros(split.num_samples, np.int64), np.zeros(0, np.int64)

    def group_keys(self, batch: object, split: Split) -> NDArray[np.int64]:
        """`(B,)` keys of the samples' groups; 0 where the schema has none."""
        if self.group is None:
            return np.zeros(split.num_samples, np.int64)
        key = self.group.key
        if isinstance(key, str):
            found = dict(walk(batch, whole=self.per_batch))
            if key not in found:
                raise SchemaError(f"group key '{key}' is not in the batch; it has {_names(found)}")
            keys = found[key]
        else:
            keys = key(batch)
        array = np.asarray(keys.cpu() if isinstance(keys, Tensor) else keys)
        if array.shape != (split.num_samples,) or not np.issubdtype(array.dtype, np.integer):
            raise SchemaError(
                f"the group key must give one integer a sample, so shape ({split.num_samples},), got {array.shape} "
                f"{array.dtype}"
            )
        return array.astype(np.int64)

    @cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(p for leaf in self.leaves for p in leaf.paths) | frozenset(self.derived)

    def _check_shape(self, tree: Tree) -> None:
        if describe(tree) != describe(self.tree):
            raise SchemaError(
                "all batches must have the same containers and leaves; the first batch was\n"
                f"  {describe(self.tree)}\nand this one is\n  {describe(tree)}"
            )

    def _columns(self, leaf: BoundLeaf, values: Sequence[Any]) -> list[Column]:
        for path, value, wanted in zip(leaf.paths, values, leaf.types, strict=True):
            if not isinstance(value, wanted):
                raise SchemaError(
                    f"leaf '{path}' must be a {wanted.__name__} as in the first batch, got a {type(value).__name__}"
                )
        columns = _split(leaf.paths[0], leaf.form, values)
        for column, spec in zip(columns, leaf.specs, strict=True):
            if column.spec != spec:
                raise SchemaError(
                    f"leaf '{leaf.paths[0]}' must have {_say(spec)} as in the first batch, got {_say(column.spec)}; "
                    "rows whose length differs from batch to batch are Jagged, or padded to one length"
                )
        return columns

    def _check_not_shared(self, leaf: BoundLeaf, value: object) -> None:
        if leaf.declared or not isinstance(value, Tensor):
            return
        last = self._last.get(leaf.paths[0])
        if last is not None and last() is value:
            raise SchemaError(
                f"leaf '{leaf.paths[0]}' is the same tensor in two batches, so it does not seem to belong to their "
                f"samples: declare BatchSchema({{'{leaf.paths[0]}': PerBatch()}}), or let the loader make a new tensor "
                "for each batch"
            )
        self._last[leaf.paths[0]] = weakref.ref(value)


class _Binder:
    """Finds the leaves of a first batch."""

    def __init__(self, schema: BatchSchema, batch: object) -> None:
        self.schema, self.declared = schema, schema.leaves
        self.batch = batch
        self.found: dict[str, object] = {}
        for path, value in walk(batch, whole=schema.per_batch):
            if path in self.found:
                raise SchemaError(f"the batch has two parts that '{path}' may mean: rename a key, so that paths differ")
            self.found[path] = value
        self.within: list[object] = []
        self.kinds: dict[str, Kind] = {}
        self.companions: dict[str, tuple[str, ...]] = {}

    def bind(self) -> BoundSchema:
        for path in self.declared:
            if path not in self.found:
                raise SchemaError(
                    f"the schema declares '{path}', which the batch does not have; it has {_names(self.found)}"
                )
        for path, kind in self.declared.items():
            if isinstance(kind, Kind):
                self.companions[path] = self._resolve(path, kind)
        self.taken = {p for paths in self.companions.values() for p in paths}
        self._visit("", self.batch)
        self._check_sizes()
        if not self.kinds:
            raise SchemaError(
                f"the batch, a {type(self.batch).__name__}, has no leaf that splits into samples; declare one"
            )
        leaves = tuple(self._leaf(path, kind) for path, kind in self.kinds.items())
        paths = {p for leaf in leaves for p in leaf.paths}
        paths |= {p for p, kind in self.declared.items() if isinstance(kind, Derived)}
        # The tree is kept for the loader's life: values of this batch that stay on the rank are small or declared.
        tree = build_tree(self.batch, lambda path, _: path in paths, whole=self.schema.per_batch)
        return self.schema.bind_to(tree, leaves)

    def _resolve(self, path: str, kind: Kind) -> tuple[str, ...]:
        parent = path.rpartition(".")[0]
        resolved: list[str] = []
        for name in (getattr(kind, c) for c in kind.companions):
            if name is None:
                continue
            choices = [p for p in (join_path(parent, name), name) if p in self.found]
            if not choices:
                raise SchemaError(
                    f"leaf '{path}' is declared with '{name}', which the batch does not have; it has "
                    f"{_names(self.found)}"
                )
            resolved.append(choices[0])
        return tuple(resolved)

    def _visit(self, path: str, value: object) -> None:
        declared, name = self.declared.get(path), f"leaf '{path}'" if path else "the batch"
        if isinstance(declared, Kind):
            self.kinds[path] = declared
        elif isinstance(declared, PerBatch | Derived) or path in self.taken:
            pass
        elif is_tensor_like(value):
            self._visit_tensor(path, value)
        elif isinstance(value, list | tuple) and self._is_objects(path, cast("list[object]", value)):
            self.kinds[path] = Objects()
        elif type(value) is int:
            raise SchemaError(
                f"leaf '{path}' is a plain int, which may be a batch size or a maximum that changes with the "
                "samples: declare "
                f"BatchSchema({{'{path}': Derived(lambda batch: …)}}), or PerBatch() where it does not"
            )
        elif not is_plain(value):
            children = children_of(value)
            if children is None:
                raise SchemaError(
                    f"{name} is a {type(value).__name__}, which cannot be split into samples; declare it PerBatch()"
                )
            if any(value is outer for outer in self.within):
                raise SchemaError(f"leaf '{path}' is a {type(value).__name__} that holds it; declare it PerBatch()")
            self.within.append(value)
            for name, child in children:
                self._visit(join_path(path, name), child)
            self.within.pop()

    def _visit_tensor(self, path: str, value: object) -> None:
        kind = _BY_TYPE.get(type_name(value))
        if kind is None and isinstance(value, Tensor) and value.is_nested:
            kind = Jagged()
        if kind is None and not isinstance(value, Tensor | np.ndarray):
            raise SchemaError(f"leaf '{path}' is a {type_name(value)}, which cannot be split; declare it PerBatch()")
        if kind is None and cast("Tensor", value).ndim == 0:
            raise SchemaError(
                f"leaf '{path}' has no dimension, so it cannot be split into samples: declare "
                f"BatchSchema({{'{path}': PerBatch()}}), or Derived(fn) where it follows from the samples"
            )
        self.kinds[path] = kind or Dense()

    def _is_objects(self, path: str, value: Sequence[object]) -> bool:
        """Whether a list holds plain values, one a sample; its length is checked with the others'."""
        if hasattr(value, "_fields") or any(_holds_tensor(v) for v in value):
            return False
        if all(is_plain(v) or isinstance(v, list | tuple | dict) for v in value):
            return True
        return False

    def _check_sizes(self) -> None:
        """Kinds that were guessed from a tensor's shape must agree with those that are certain."""
        sizes = {path: self._columns(path, kind)[0].num_samples for path, kind in self.kinds.items()}
        certain = [p for p, k in self.kinds.items() if p in self.declared or not isinstance(k, Dense | Objects)]
        reference = (certain or list(sizes) or [""])[0]
        for path, size in sizes.items():
            if size != sizes[reference]:
                raise SchemaError(
                    f"leaf '{path}' has {size} rows, but '{reference}' says that the batch has {sizes[reference]} "
                    f"samples: declare BatchSchema({{'{path}': …}}) as Jagged(lengths='…'), if its rows belong to "
                    "samples, or as PerBatch(), if they do not"
                )

    def _values(self, path: str) -> list[Any]:
        return [self.found[p] for p in (path, *self.companions.get(path, ()))]

    def _columns(self, path: str, kind: Kind) -> list[Column]:
        values = self._values(path)
        return _split(path, self._form(path, kind), values)

    def _form(self, path: str, kind: Kind) -> Form:
        try:
            return kind.form(self._values(path))
        except SchemaError as e:
            raise SchemaError(f"leaf '{path}' {e}") from None

    def _leaf(self, path: str, kind: Kind) -> BoundLeaf:
        specs = tuple(c.spec for c in self._columns(path, kind))
        paths = (path, *self.companions.get(path, ()))
        return BoundLeaf(
            paths=paths,
            types=tuple(type(v) for v in self._values(path)),
            form=self._form(path, kind),
            specs=specs,
            is_history=isinstance(kind, Jagged | Keyed),
            has_candidates=isinstance(kind, Nested),
            declared=path in self.declared,
        )


def _split(path: str, form: Form, values: Sequence[Any]) -> list[Column]:
    try:
        return form.split(values)
    except SchemaError as e:
        raise SchemaError(f"leaf '{path}' {e}") from None
    except Exception as e:
        raise SchemaError(f"leaf '{path}' cannot be split: {type(e).__name__}: {e}") from e


def _names(found: Mapping[str, object]) -> list[str]:
    """The paths of a batch's parts, without the elements of lists."""
    return [path for path in found if path and not any(part.isdigit() for part in path.split("."))] or list(found)


def _holds_tensor(value: object) -> bool:
    return is_tensor_like(value) or any(is_tensor_like(v) for _, v in walk(value))


def _say(spec: ColumnSpec) -> str:
    rows = "one row" if spec.num_keys is None else f"{spec.num_keys} jagged row{'s' if spec.num_keys > 1 else ''}"
    return f"{rows} a sample of {str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
