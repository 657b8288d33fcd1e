"""Collections by feature: the bits of synchronous mode, TorchRec's numbers, and every form of input."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fs_embed
from benchmarks.parity import FAULTS, Ids, against_torchrec, is_caught, is_equal
from tests.ranks import RankPool

TABLES = [
    fs_embed.TableConfig("user", 11, 4, ("user",)),
    fs_embed.TableConfig("item", 13, 4, ("seen", "liked"), pooling="mean"),
    fs_embed.TableConfig("word", 7, 6, ("word",), dtype=torch.bfloat16),
]


@pytest.mark.parametrize("kind", ["collection", "bags"])
def test_collections_give_the_bits_of_synchronous(ranks: Callable[[int], RankPool], kind: str) -> None:
    assert ranks(2).run(is_equal, kind, "adam", Ids(), 20) == [True, True]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_deliberate_fault_is_caught(ranks: Callable[[int], RankPool], fault: str) -> None:
    assert any(ranks(2).run(is_caught, fault, 12))


@pytest.mark.parametrize("kind", ["collection", "bags"])
def test_collections_learn_what_torchrec_learns(ranks: Callable[[int], RankPool], kind: str) -> None:
    pytest.importorskip("torchrec")
    for difference in ranks(2).run(against_torchrec, kind, "rowwise_adagrad", 20, timeout_s=120):
        assert difference < 1e-5  # a row's few gradients in another order, over 20 steps


def _inputs() -> dict[str, Tensor]:
    return {name: torch.tensor([[1, 2], [3, 4], [5, 6]]) for name in ("user", "seen", "liked", "word")}


def test_tables_of_several_widths_and_dtypes_are_looked_up_together() -> None:
    module = fs_embed.PrioritizedEmbeddingCollection(TABLES, optimizer=fs_embed.SGD(lr=0.5))
    assert len(module.tables.stores) == 2
    module.eval()
    out, state = module(_inputs()), module.state_dict()
    assert set(state) == {f"embeddings.{t.name}.weight" for t in TABLES}
    for table in TABLES:
        for feature in table.feature_names:
            found = out[feature]
            assert torch.equal(found.values(), state[f"embeddings.{table.name}.weight"][torch.arange(1, 7)])
            assert found.values().dtype == table.dtype
            assert [len(x) for x in found.to_dense()] == [2, 2, 2]


def test_bags_pool_as_nn_embedding_bag_does() -> None:
    module = fs_embed.PrioritizedEmbeddingBagCollection(TABLES, optimizer=fs_embed.SGD(lr=0.5))
    module.eval()
    out, state = module(_inputs()), module.state_dict()
    weight = state["embedding_bags.item.weight"]
    expected = nn.functional.embedding_bag(_inputs()["seen"], weight, mode="mean")
    torch.testing.assert_close(out["seen"], expected)


def test_keyed_jagged_tensors_with_weights_shared_tables_and_no_samples() -> None:
    torchrec = pytest.importorskip("torchrec")
    shared = [fs_embed.TableConfig("a", 5, 3, ("x",)), fs_embed.TableConfig("b", 5, 3, ("x", "y"))]
    bags = fs_embed.PrioritizedEmbeddingBagCollection(shared, is_weighted=True, optimizer=fs_embed.SGD(lr=0.5)).eval()
    kjt = torchrec.KeyedJaggedTensor(
        ["y", "unused", "x"],
        torch.tensor([1, 2, 9, 9, 3]),
        lengths=torch.tensor([2, 0, 1, 1, 0, 1]),
        weights=torch.tensor([0.5, 2.0, 1.0, 1.0, 3.0]),
    )
    out, state = bags(kjt).to_dict(), bags.state_dict()
    assert list(out) == ["x@a", "x@b", "y"]
    b = state["embedding_bags.b.weight"]
    torch.testing.assert_close(out["y"], torch.stack([0.5 * b[1] + 2 * b[2], torch.zeros(3)]))
    torch.testing.assert_close(out["x@b"][1], 3 * b[3])
    sequence = fs_embed.PrioritizedEmbeddingCollection(shared, optimizer=fs_embed.SGD(lr=0.5)).eval()
    empty = torchrec.KeyedJaggedTensor(["x", "y"], torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert all(rows.values().shape == (0, 3) for rows in sequence(empty).values())


def test_swapping_torchrecs_collections_keeps_rows_and_keys() -> None:
    torchrec = pytest.importorskip("torchrec")
    model = nn.Module()
    configs = [torchrec.EmbeddingConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])]
    model.ec = torchrec.EmbeddingCollection(tables=configs)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kjt = torchrec.KeyedJaggedTensor(["f"], torch.tensor([5, 0]), lengths=torch.tensor([1, 1]))
    expected = model.ec(kjt)["f"].values().detach()
    fs_embed.prioritize(model, optimizer=fs_embed.SGD(lr=0.1))
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {k: v.tolist() for k, v in before.items()}
    model.eval()
    assert torch.equal(model.ec(kjt)["f"].values(), expected)
    fs_embed.unprioritize(model)
    assert isinstance(model.ec, torchrec.EmbeddingCollection)
    assert torch.equal(model.ec(kjt)["f"].values(), expected)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_nn_embedding_bag_trains_as_before(mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(9, 3, mode=mode, padding_idx=0)
    model = nn.Module()
    model.bag = nn.EmbeddingBag(9, 3, mode=mode, padding_idx=0, _weight=plain.weight.detach().clone())
    fs_embed.prioritize(model, optimizer=fs_embed.SGD(lr=0.5))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids, offsets = torch.tensor([1, 2, 0, 4, 4, 5]), torch.tensor([0, 2, 2, 5])
    model.bag.prefetch([ids])
    model.bag.prefetch(None)
    expected, found = plain(ids, offsets), model.bag(ids, offsets)
    torch.testing.assert_close(found, expected)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bag.state_dict()["weight"], plain.weight.detach())


def test_ids_outside_a_table_are_hashed_on_request() -> None:
    ids = torch.tensor([0, 3, -1, 2**40, 2**62 + 1])
    weight = torch.arange(4.0)[:, None].expand(4, 2).contiguous()
    strict = fs_embed.PrioritizedEmbedding(weight, optimizer=fs_embed.SGD(lr=1.0), name="t").eval()
    with pytest.raises(fs_embed.IdOutOfRange, match="from 0 to 3 in table 't'"):
        strict(ids)
    rows = fs_embed.PrioritizedEmbedding(weight, optimizer=fs_embed.SGD(lr=1.0), hash_ids=True).eval()(ids)
    assert rows[:2, 0].tolist() == [0.0, 3.0]
    assert all(0 <= r <= 3 for r in rows[:, 0].tolist())


def test_int32_ids_and_keys_beyond_int32() -> None:
    from fs_embed.rows import RowShards

    shards = RowShards([3 * 2**31], 4)
    ids = torch.tensor([0, 2**31 + 5, 3 * 2**31 - 1])
    assert (shards.keys(0, ids) // shards.num_slots).tolist() == [0, 1, 3]
    table = fs_embed.PrioritizedEmbedding(torch.eye(3), optimizer=fs_embed.SGD(lr=1.0)).eval()
    assert torch.equal(table(torch.tensor([2, 0], dtype=torch.int32)), torch.eye(3)[[2, 0]])


def test_a_scheduled_rate_is_that_of_the_backward() -> None:
    model = nn.Module()
    model.t = nn.Embedding.from_pretrained(torch.zeros(2, 1), freeze=False)
    fs_embed.prioritize(model, optimizer=fs_embed.SGD(lr=1.0))
    faces = fs_embed.TableOptimizers(model)
    schedule = torch.optim.lr_scheduler.StepLR(faces, 1, gamma=0.5)
    ids = [torch.tensor([0]), torch.tensor([0]), None]
    model.t.prefetch([ids[0]])
    for now, after in itertools.pairwise(ids):
        model.t.prefetch(None if after is None else [after])
        model.t(now).sum().backward()
        faces.step()
        schedule.step()
    assert model.t.state_dict()["weight"].tolist() == [[-1.5], [0.0]]
