"""Schemas: whatever a batch is made of, its samples can be exchanged, and what is not clear is an error by name."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fs_data import BatchSchema, Dense, Derived, Jagged, JaggedColumn, Keyed, Nested, Objects, PerBatch, SchemaError
from fs_data.exchange import Balanced, Exchange, ExchangeConfig, Raw
from fs_data.local import Measures
from fs_data.planner import Planner
from tests.fs_data.kinds import CONTAINERS, LEAVES, KeyedJaggedTensor, parts, prefix
from tests.fs_data.threads import ThreadWorld, run_ranks


def exchange(batches: list[Any], schema: BatchSchema, destination: list[int]) -> list[Balanced]:
    """What each rank gets of `batches`, one a rank, when sample g goes to `destination[g]`."""
    config = ExchangeConfig(schema=schema, measures=Measures(), on_exhausted="balance", settings="")

    def task(world: ThreadWorld) -> Balanced:
        planner = Planner(lambda w, _: np.asarray(destination), lambda f: f.num_tokens, world_size=world.size)
        balanced = Exchange(world, config, planner).step(Raw(batch=batches[world.rank], state={}))
        assert balanced is not None
        if balanced.error:
            raise balanced.error
        return balanced

    return run_ranks(len(batches), task)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Sample ids by rank, some ranks with none, and a destination for each sample."""
    size = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any))
    first = np.cumsum([0, *counts])
    ids = [list(range(a, b)) for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]
    return ids, draw(st.lists(st.integers(0, size - 1), min_size=int(first[-1]), max_size=int(first[-1])))


@settings(max_examples=200, deadline=None)
@given(
    world=worlds(),
    container=st.sampled_from(list(CONTAINERS)),
    names=st.lists(st.sampled_from(list(LEAVES)), min_size=1, max_size=4, unique=True),
)
def test_every_sample_arrives_whole_where_the_plan_says(
    world: tuple[list[list[int]], list[int]], container: str, names: list[str]
) -> None:
    ids, destination = world
    keys = [n.replace(" ", "_") for n in names]
    makers = dict(zip(keys, (LEAVES[n] for n in names), strict=True))
    declared = {
        f"{prefix(container)}.{key}{'.' if path else ''}{path}": kind
        for key, maker in makers.items()
        for path, kind in maker.declared.items()
    }

    def make(here: list[int]) -> Any:
        rest = {key: maker.make(here) for key, maker in makers.items()}
        return CONTAINERS[container](torch.tensor(here, dtype=torch.int64), rest)

    originals = [make(here) for here in ids]
    for rank, got in enumerate(exchange(originals, BatchSchema(declared), destination)):
        wanted = [g for g, d in enumerate(destination) if d == rank]
        found, rest = parts(got.batch)
        real = got.weights["samples"] > 0
        assert found[torch.from_numpy(real)].tolist() == wanted
        assert len(found) == max(1, len(wanted))
        assert type(got.batch) is type(originals[rank])
        _, original = parts(originals[rank])
        for key, maker in makers.items():
            assert type(rest[key]) is type(original[key])
            assert maker.per_sample(rest[key]) == maker.per_sample(maker.make(found.tolist())), key


def test_nothing_is_copied_for_a_rank_that_keeps_its_batch() -> None:
    batches = [{"id": torch.arange(3)}, {"id": torch.arange(3, 5)}]
    first, second = exchange(batches, BatchSchema(), [0, 0, 0, 1, 1])
    assert first.batch is batches[0]
    assert second.batch is batches[1]


def test_tensordict_comes_back_with_its_new_batch_size() -> None:
    tensordict = pytest.importorskip("tensordict")

    def make(ids: list[int]) -> Any:
        inner = tensordict.TensorDict({"x": torch.tensor(ids)[:, None]}, batch_size=[len(ids)])
        return tensordict.TensorDict({"id": torch.tensor(ids), "inner": inner}, batch_size=[len(ids)])

    first, second = exchange([make([0, 1, 2]), make([3])], BatchSchema(), [0, 1, 1, 1])
    assert first.batch.batch_size == first.batch["inner"].batch_size == torch.Size([1])
    assert second.batch.batch_size == torch.Size([3])
    assert second.batch["id"].tolist() == second.batch["inner", "x"].flatten().tolist() == [1, 2, 3]


def test_what_belongs_to_the_batch_stays_and_what_follows_from_samples_is_computed_anew() -> None:
    def make(ids: list[int]) -> Any:
        rows = JaggedColumn.from_lengths(torch.arange(sum(ids)), torch.tensor(ids))
        return {
            "seq": rows,
            "size": len(ids),
            "longest": max(ids),
            "table": torch.full((9, 2), float(ids[0])),
            "eps": 0.1,
        }

    schema = BatchSchema(
        {
            "size": Derived(lambda b: len(b["seq"])),
            "longest": Derived(lambda b: int(b["seq"].lengths.max())),
            "table": PerBatch(),
        }
    )
    first, second = exchange([make([1, 2]), make([7, 4])], schema, [0, 0, 0, 1])
    assert (first.batch["size"], first.batch["longest"], first.batch["eps"]) == (3, 7, 0.1)
    assert (second.batch["size"], second.batch["longest"]) == (1, 4)
    assert first.batch["table"][0, 0] == 1
    assert second.batch["table"][0, 0] == 7


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(3), "table": torch.zeros(9, 2)},
            r"leaf 'table' has 9 rows, but 'x' says .* 3 samples.*PerBatch",
        ),
        ({"x": torch.zeros(3), "n": 3}, r"leaf 'n' is a plain int, which may be a batch size.*Derived"),
        ({"x": torch.zeros(3), "n": torch.tensor(3)}, r"leaf 'n' has no dimension"),
        ({"x": torch.zeros(3), "names": ["a", "b"]}, r"leaf 'names' has 2 rows, but 'x'"),
        ({"x": torch.zeros(3), "deep": {"set": {1, 2}}}, r"leaf 'deep.set' is a set, which cannot be split"),
        (
            {"x": torch.zeros(3).to_sparse()},
            r"leaf 'x' must be a dense tensor or a numpy array, got a torch.sparse_coo",
        ),
        ({"eps": 0.5}, r"a dict, has no leaf that splits into samples"),
        (
            {"seq": JaggedColumn(torch.zeros(5), torch.tensor([0, 2, 4]))},
            r"leaf 'seq' has 5 values, so its offsets must not decrease and run from 0 to 5; they are from 0 to 4",
        ),
    ],
)
def test_an_unclear_leaf_is_named(batch: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f"(?s){message}"):
        BatchSchema().bind(batch)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"y": Dense()}, r"the schema declares 'y', which the batch does not have; it has \['x', 'n', 'k'\]"),
        ({"x": Jagged(lengths="m")}, r"leaf 'x' is declared with 'm', which the batch does not have"),
        ({"x": Jagged()}, r"leaf 'x' is declared Jagged, but a Tensor does not say where its rows end"),
        ({"x": Jagged(lengths="n", offsets="n")}, r"leaf 'x' is declared with both lengths and offsets"),
        ({"x": Nested()}, r"leaf 'x' is declared Nested, but a Tensor does not say"),
        ({"x": Keyed()}, r"leaf 'x' is declared Keyed, which means a KeyedJaggedTensor; got a Tensor"),
        ({"k": Objects()}, r"leaf 'k' holds a set"),
    ],
)
def test_a_declaration_that_does_not_fit_is_named(declared: Any, message: str) -> None:
    batch = {"x": torch.zeros(3), "n": torch.tensor([1, 2]), "k": [{1}, {2}] if "k" in declared else ["a", "b"]}
    with pytest.raises(SchemaError, match=f"(?s){message}"):
        BatchSchema(declared).bind(batch)


def test_a_kind_must_be_an_instance() -> None:
    with pytest.raises(TypeError, match=r"leaf 'x' must be declared as Dense\(\), Jagged\(\)"):
        BatchSchema({"x": Dense})  # type: ignore[dict-item]


ROW = JaggedColumn.from_lengths(torch.zeros(2), torch.tensor([2]))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"x": torch.zeros(4), "seq": ROW}, "'seq' has 1, 'x' has 4"),
        (
            {"x": torch.zeros(1, 3), "seq": ROW},
            r"leaf 'x' must have .* float32\[\] as in the first .*, got .*float32\[3\]",
        ),
        ({"x": torch.zeros(1), "seq": {"a": ROW}}, r"leaf 'seq' must be a JaggedColumn"),
        ({"y": torch.zeros(1)}, "must have the same containers and leaves"),
    ],
)
def test_a_later_batch_that_does_not_fit_is_named(later: Any, message: str) -> None:
    bound = BatchSchema().bind(
        {"x": torch.zeros(3), "seq": JaggedColumn.from_lengths(torch.zeros(4), torch.tensor([1, 0, 3]))}
    )
    with pytest.raises(SchemaError, match=message):
        bound.split(later)


def test_a_tensor_that_two_batches_share_is_not_taken_for_samples() -> None:
    shared = torch.zeros(128, 4)  # as many rows as the batch has samples: by its shape it looks like one row a sample
    bound = BatchSchema().bind({"x": torch.zeros(128), "shared": shared})
    bound.split({"x": torch.zeros(128), "shared": shared})
    with pytest.raises(SchemaError, match=r"leaf 'shared' is the same tensor in two batches.*PerBatch"):
        bound.split({"x": torch.zeros(128), "shared": shared})
    declared = BatchSchema({"shared": PerBatch()}).bind({"x": torch.zeros(128), "shared": shared})
    for _ in range(2):
        assert declared.split({"x": torch.zeros(128), "shared": shared}).num_samples == 128


def test_schemas_of_different_batches_differ_and_of_like_batches_agree() -> None:
    def fingerprint(**leaves: Any) -> int:
        return BatchSchema().bind({"x": torch.zeros(2), **leaves}).fingerprint

    variants = [
        {}, {"y": torch.zeros(2)}, {"z": torch.zeros(2)}, {"y": torch.zeros(2, 1)}, {"y": torch.zeros(2).int()},
        {"y": ["a", "b"]}, {"y": JaggedColumn.from_lengths(torch.zeros(2), torch.tensor([1, 1]))},
        {"y": KeyedJaggedTensor(["a"], torch.zeros(2), lengths=torch.tensor([1, 1]))},
        {"y": KeyedJaggedTensor(["b"], torch.zeros(2), lengths=torch.tensor([1, 1]))},
    ]  # fmt: skip
    assert len({fingerprint(**v) for v in variants}) == len(variants)
    assert fingerprint(y=torch.ones(2)) == fingerprint(y=torch.zeros(2))


def test_an_exhausted_rank_learns_the_type_of_batches_it_never_had() -> None:
    config = ExchangeConfig(schema=BatchSchema(), measures=Measures(), on_exhausted="balance", settings="")
    make, names = CONTAINERS["named tuple"], [n for n in LEAVES if not LEAVES[n].declared]

    def task(world: ThreadWorld) -> Any:
        planner = Planner(lambda w, _: np.asarray([0, 1, 1]), lambda f: f.num_tokens, world_size=2)
        batch = make(torch.arange(3), {n: LEAVES[n].make([0, 1, 2]) for n in names}) if world.rank == 0 else None
        return Exchange(world, config, planner).step(Raw(batch=batch, state={}))

    _, second = run_ranks(2, task)
    assert type(second.batch).__name__ == "Tuple"
    assert second.batch.id.tolist() == [1, 2]
    for name in names:
        assert LEAVES[name].per_sample(second.batch.rest[name]) == LEAVES[name].per_sample(LEAVES[name].make([1, 2]))


def test_history_lengths_are_the_longest_rows() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.zeros(9), lengths=torch.tensor([1, 0, 5, 3]))
    bound = BatchSchema().bind(
        {"seq": JaggedColumn.from_lengths(torch.zeros(6), torch.tensor([2, 4])), "k": kjt, "name": ["long name", "x"]}
    )
    split = bound.split(
        {"seq": JaggedColumn.from_lengths(torch.zeros(6), torch.tensor([2, 4])), "k": kjt, "name": ["long name", "x"]}
    )
    assert bound.history_lengths(split).tolist() == [5, 4]
