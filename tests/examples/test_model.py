"""The example's model: what a user is told must not depend on who else is in the batch."""

import torch

from examples.model import ModelConfig, SequenceModel
from fs_data import JaggedColumn


def make() -> SequenceModel:
    torch.manual_seed(0)
    return SequenceModel(ModelConfig(num_items=50, max_length=10, dim=8, num_heads=2)).double().eval()


def test_a_history_is_scored_alike_alone_and_in_company() -> None:
    model, rows = make(), [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    together = model.score(
        JaggedColumn.from_lengths(torch.arange(1, 10), torch.tensor([3, 1, 5])), torch.arange(6).view(3, 2)
    )
    for b, row in enumerate(rows):
        alone = JaggedColumn.from_lengths(torch.tensor(row), torch.tensor([len(row)]))
        torch.testing.assert_close(model.score(alone, torch.arange(6).view(3, 2)[b : b + 1]), together[b : b + 1])


def test_later_items_do_not_reach_back() -> None:
    model = make()
    table = model.item_emb(torch.tensor([1, 2, 3, 4]))
    offsets = torch.tensor([0, 4])
    before = model.encode(table, offsets)
    changed = table.detach().clone()
    changed[3] += 1
    torch.testing.assert_close(model.encode(changed, offsets)[:3], before[:3], rtol=0, atol=0)
    assert not torch.equal(model.encode(changed, offsets)[3], before[3])


def test_an_empty_batch_has_no_losses() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    column = JaggedColumn(empty, torch.zeros(1, dtype=torch.int64))
    assert make()(column, empty, empty).shape == (0,)
