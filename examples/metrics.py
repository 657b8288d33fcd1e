"""The figures that the example reports: normalized entropy, hit rate and NDCG among sampled items, stragglers."""

import math

import torch
from torch import Tensor


def normalized_entropy(mean_loss: float) -> float:
    """Cross-entropy over that of always guessing the base rate; one true and one random item a position make it 1/2."""
    return mean_loss / math.log(2)


def ranking_sums(scores: Tensor, k: int = 10) -> Tensor:
    """`(3,)` float64: sums of hits@k and NDCG@k, and the number of users, which add up over batches and ranks.

    Args:
        scores: `(B, C)`; column 0 is the true item. Whatever does not score less counts against it, so
            that constant scores earn nothing, nor do those that are not numbers.
    """
    rank = (~(scores[:, 1:] < scores[:, :1])).sum(1)  # (B,) how many random items come before the true one
    hit = rank < k
    gain = 1 / torch.log2(rank.double() + 2)
    return torch.stack([hit.double().sum(), (gain * hit).sum(), torch.tensor(float(len(scores)), dtype=torch.float64)])


def straggler_share(compute_s: Tensor) -> float:
    """How much longer the slowest rank computes than the average one, `Σ_t max_r / Σ_t mean_r − 1`.

    Args:
        compute_s: `(T, R)` seconds of compute without waiting, by step and rank.
    """
    return float(compute_s.amax(1).sum() / compute_s.mean(1).sum() - 1) if compute_s.numel() else 0.0
