"""The example's figures, on numbers that one can follow."""

import math

import torch

from examples.metrics import normalized_entropy, ranking_sums, straggler_share


def test_guessing_has_normalized_entropy_one() -> None:
    assert math.isclose(normalized_entropy(math.log(2)), 1.0)


def test_rank_three_hits_and_gains_half() -> None:
    scores = torch.arange(20.0).flip(0).repeat(1, 1)
    scores[0, 0] = 16.5  # after 18, 17, and before 16
    hits, gain, users = ranking_sums(scores).tolist()
    assert (hits, users) == (1.0, 1.0)
    assert math.isclose(gain, 1 / math.log2(4))


def test_constant_scores_earn_nothing() -> None:
    assert ranking_sums(torch.zeros(5, 101)).tolist() == [0.0, 0.0, 5.0]


def test_scores_that_are_no_numbers_earn_nothing() -> None:
    assert ranking_sums(torch.full((5, 101), math.nan)).tolist() == [0.0, 0.0, 5.0]
    one = torch.zeros(1, 101)
    one[0, 0] = math.nan
    assert ranking_sums(one).tolist() == [0.0, 0.0, 1.0]


def test_straggler_share_is_the_slowest_rank_over_the_mean() -> None:
    assert math.isclose(straggler_share(torch.tensor([[1.0, 3.0], [2.0, 2.0]])), 5 / 4 - 1)
