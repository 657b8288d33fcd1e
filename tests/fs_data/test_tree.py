"""Batches of all shapes come back as they were: nothing in them is of other samples than those that were sent."""

import dataclasses
import functools
from collections.abc import Callable
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fs_data import BatchSchema, Jagged, JaggedColumn, Nested, PerBatch, RankFailed, SchemaError
from tests.fs_data.kinds import KeyedJaggedTensor
from tests.fs_data.test_schema import exchange

Make = Callable[[list[int]], Any]


def swapped(make: Make, schema: BatchSchema | None = None) -> tuple[Any, Any]:
    """Samples 0, 1, 2 and 3, 4, 5 of two ranks, after odd ones went to the first and even ones to the second."""
    found = exchange([make([0, 1, 2]), make([3, 4, 5])], schema or BatchSchema(), [1, 0, 1, 0, 1, 0])
    return found[0].batch, found[1].batch


@dataclasses.dataclass
class Described:
    x: Tensor

    @functools.cached_property
    def twice(self) -> Tensor:
        return self.x * 2


class Items(dict[str, Any]):
    """Items that are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Slotted(SimpleNamespace):
    __slots__ = ("twice",)


class Mode(Enum):
    TRAIN = 1


def _described(ids: list[int]) -> Described:
    batch = Described(torch.tensor(ids))
    assert batch.twice.tolist() == [2 * i for i in ids]
    return batch


def _with_more(ids: list[int]) -> Described:
    batch = Described(torch.tensor(ids))
    batch.more = torch.tensor(ids) * 2  # pyright: ignore
    return batch


def _slotted(ids: list[int]) -> Slotted:
    batch = Slotted(x=torch.tensor(ids))
    batch.twice = torch.tensor(ids) * 2
    return batch


def test_what_a_batch_has_computed_of_its_samples_is_computed_anew() -> None:
    for batch, ids in zip(swapped(_described), ([1, 3, 5], [0, 2, 4]), strict=True):
        assert batch.x.tolist() == ids
        assert batch.twice.tolist() == [2 * i for i in ids]


@pytest.mark.parametrize(("make", "name"), [(_with_more, "more"), (_slotted, "twice")])
def test_attributes_beside_declared_fields_are_exchanged(make: Make, name: str) -> None:
    for batch in swapped(make):
        assert getattr(batch, name).tolist() == (batch.x * 2).tolist()


def test_items_that_are_attributes_too_stay_the_same() -> None:
    for batch in swapped(lambda ids: Items(x=torch.tensor(ids))):
        assert type(batch) is Items
        assert vars(batch)["x"] is batch["x"]


def test_attrs_classes_are_containers() -> None:
    attrs = pytest.importorskip("attrs")
    Defined = attrs.make_class("Defined", ["x"], slots=True)
    first, second = swapped(lambda ids: Defined(torch.tensor(ids)))
    assert (type(first), first.x.tolist(), second.x.tolist()) == (Defined, [1, 3, 5], [0, 2, 4])


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (torch.tensor, Tensor.tolist),
        (np.array, np.ndarray.tolist),
        (lambda ids: JaggedColumn(torch.tensor(ids), torch.arange(len(ids) + 1)), lambda x: x.values.tolist()),
        (lambda ids: [str(i) for i in ids], lambda x: [int(i) for i in x]),
        (
            lambda ids: KeyedJaggedTensor(["a"], torch.tensor(ids), lengths=torch.ones(len(ids)).int()),
            lambda x: x.values().tolist(),
        ),
    ],
)  # fmt: skip
def test_a_batch_may_be_a_leaf_itself(make: Make, plain: Callable[[Any], list[int]]) -> None:
    assert [plain(b) for b in swapped(make)] == [[1, 3, 5], [0, 2, 4]]


def test_members_of_an_enum_stay_what_they_are() -> None:
    for schema in (BatchSchema(), BatchSchema({"mode": PerBatch()})):
        for batch in swapped(lambda ids: {"x": torch.tensor(ids), "mode": Mode.TRAIN}, schema):
            assert batch["mode"] is Mode.TRAIN
            assert Mode.TRAIN.value == 1


class Shared:
    """One object for all; a copy of it is itself, and it holds itself."""

    def __init__(self) -> None:
        self.table, self.me = {"a": 1}, self

    def __copy__(self) -> "Shared":
        return self


def test_what_is_declared_per_batch_is_not_looked_into() -> None:
    shared = Shared()
    values = iter([shared, None, ["a"], {"b": shared}])
    first, second = swapped(lambda ids: {"x": torch.tensor(ids), "of": next(values)}, BatchSchema({"of": PerBatch()}))
    assert (first["of"], second["of"], shared.table) == (shared, None, {"a": 1})
    first, second = swapped(lambda ids: {"x": torch.tensor(ids), "of": next(values)}, BatchSchema({"of": PerBatch()}))
    assert (first["of"], second["of"]) == (["a"], {"b": shared})


def test_tensordicts_keep_their_kind() -> None:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Users:
        id: Tensor
        name: list[str]
        source: str

    def make(ids: list[int]) -> Any:
        return Users(torch.tensor(ids), [str(i) for i in ids], "log", batch_size=[len(ids)])  # pyright: ignore

    for batch in swapped(make):
        assert type(batch) is Users
        assert batch.batch_size == (3,)
        assert [str(i) for i in batch.to("cpu").id.tolist()] == list(batch.name)
        assert batch.source == "log"
    for batch in swapped(lambda ids: tensordict.TensorDict({"x": torch.tensor(ids)}, batch_size=[])):
        assert batch.batch_size == ()


@pytest.mark.parametrize("lengths", [np.array, torch.tensor])
@pytest.mark.parametrize("values", [np.array, torch.tensor])
def test_leaves_that_belong_together_may_be_arrays_or_tensors(values: Any, lengths: Any) -> None:
    def make(ids: list[int]) -> Any:
        ones = [1] * len(ids)
        return {
            "v": values(ids), "n": lengths(ones), "u": values(ids), "ends": lengths([*range(len(ids) + 1)]),
            "w": values(ids), "c": lengths(ones), "l": lengths(ones),
        }  # fmt: skip

    schema = BatchSchema(
        {"v": Jagged(lengths="n"), "u": Jagged(offsets="ends"), "w": Nested(candidates="c", lengths="l")}
    )
    expected = make([1, 3, 5])
    for key, value in swapped(make, schema)[0].items():
        assert type(value) is type(expected[key])
        assert value.dtype == expected[key].dtype
        assert sorted(value.tolist()) == expected[key].tolist()


class Marked(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: torch.complex(torch.tensor(ids).float(), torch.tensor(ids).float()).conj(),
        lambda ids: torch.complex(torch.zeros(len(ids)), torch.tensor(ids).float()).conj().imag,
        lambda ids: torch.tensor(ids).as_subclass(Marked),
    ],
    ids=["conjugate", "negative", "subclass"],
)
def test_lazy_bits_and_subclasses_of_tensors_are_kept(make: Make) -> None:
    first, second = exchange([make([0, 1]), make([2, 3])], BatchSchema(), [1, 1, 0, 0])
    for found, expected in ((first.batch, make([2, 3])), (second.batch, make([0, 1]))):
        assert type(found) is type(expected)
        assert found.tolist() == expected.tolist()


class Pair(NamedTuple):
    a: int


class Level(IntEnum):
    LOW = 1


class Loop:
    def __init__(self, x: Tensor) -> None:
        self.x, self.me = x, self


class Labelled(dict[str, Any]):
    pass


def _beside() -> Labelled:
    batch = Labelled(x=torch.zeros(3))
    batch.label = torch.zeros(3)  # pyright: ignore
    return batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a.b": torch.zeros(3), "a": {"b": torch.zeros(3)}}, "two parts that 'a.b' may mean"),
        ({1: torch.zeros(3), "1": torch.zeros(3)}, "two parts that '1' may mean"),
        (_beside(), r"the batch, a Labelled, has tensors in its attributes \['label'\]"),
        (Loop(torch.zeros(3)), r"leaf 'me' is a Loop that holds it; declare it PerBatch"),
        ({"x": np.array(["a"])}, "leaf 'x' is an array of <U1, which torch does not have: make it a list"),
        ({"x": np.ma.masked_array([1], [True])}, "leaf 'x' must be a dense tensor or a numpy array, got a MaskedArray"),
        ({"x": [Pair(1)]}, "leaf 'x' holds a Pair"),
        ({"x": [Level.LOW]}, "leaf 'x' holds a Level"),
        ({"k": KeyedJaggedTensor([], torch.zeros(0), lengths=torch.zeros(0).int())}, "leaf 'k' has no keys"),
    ],
)
def test_what_would_be_mixed_up_is_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises((SchemaError, RankFailed), match=message):
        exchange([batch], BatchSchema(), [0])


def test_lengths_in_a_list_are_refused_by_name() -> None:
    schema = BatchSchema({"v": Jagged(lengths="n")})
    with pytest.raises(RankFailed, match="leaf 'v' must have its lengths or offsets in a tensor or array"):
        exchange([{"v": torch.zeros(1), "n": [1]}], schema, [0])


def test_batches_that_are_empty_on_all_ranks_say_so() -> None:
    with pytest.raises(RankFailed, match="batch 0 is empty on every rank"):
        exchange([{"x": torch.zeros(0)}, {"x": torch.zeros(0)}], BatchSchema(), [])
