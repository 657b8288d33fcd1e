"""A SASRec-like next-item model on jagged histories, in plain PyTorch.

Self-attentive sequential recommendation (Kang and McAuley, ICDM 2018): causal self-attention over a user's history,
trained to tell each next item from one random item. Histories are never padded: a batch's items lie back to back, so
compute follows the batch's true lengths, as in HSTU-like models.

Legend: B users, N items of all histories together, D features, H heads.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fs_data import JaggedColumn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    num_items: int
    """Ids run from 1 to num_items; 0 is never a real item."""
    max_length: int = 50
    """Longest history that the model sees."""
    dim: int = 50
    num_blocks: int = 2
    num_heads: int = 1
    dropout: float = 0.5


class SequenceModel(nn.Module):
    """Scores items by the dot product of their embedding with the user's state after each item."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.item_emb = nn.Embedding(config.num_items + 1, config.dim)
        self.position_emb = nn.Embedding(config.max_length, config.dim)
        for table in (self.item_emb, self.position_emb):
            nn.init.normal_(table.weight, std=0.01)  # small: large random rows drown what few updates teach
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.num_heads, config.dropout) for _ in range(config.num_blocks)
        )
        self.norm = nn.LayerNorm(config.dim, eps=1e-8)
        self.clock = ComputeClock()

    def forward(self, seq: JaggedColumn, pos: Tensor, neg: Tensor) -> Tensor:
        """The binary cross-entropy of each position's next item against one random item.

        Args:
            seq: B histories, `(N,)` int64 values; row b's position t is followed by `pos` at the same place.
            pos: `(N,)` int64, the next items.
            neg: `(N,)` int64, random items that are not in the history.

        Returns:
            `(N,)`: the two terms of the loss at each position, averaged.
        """
        items, positive, negative = self.item_emb(seq.values), self.item_emb(pos), self.item_emb(neg)  # (N, D) each
        with self.clock:
            state = self.encode(items, seq.offsets)
            losses = F.softplus(-(state * positive).sum(-1)) + F.softplus((state * negative).sum(-1))
            return losses / 2

    def score(self, seq: JaggedColumn, candidates: Tensor) -> Tensor:
        """`(B, C)` scores of each user's `candidates` `(B, C)` as the item after the whole history `seq`."""
        items, others = self.item_emb(seq.values), self.item_emb(candidates)  # (N, D), (B, C, D)
        last = self.encode(items, seq.offsets)[seq.offsets[1:] - 1]  # (B, D)
        return torch.einsum("bd,bcd->bc", last, others)

    def encode(self, items: Tensor, offsets: Tensor) -> Tensor:
        """`(N, D)`: the user's state after each item."""
        lengths = offsets.diff()
        position = torch.arange(len(items), device=items.device) - offsets[:-1].repeat_interleave(lengths)
        x = self.dropout(items * self.config.dim**0.5 + self.position_emb(position))
        spans: Sequence[int] = lengths.tolist()
        for block in self.blocks:
            x = block(x, spans)
        return self.norm(x)


class Block(nn.Module):
    """Causal self-attention within each history, then a position-wise network; both with residual connections."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.attention_norm = nn.LayerNorm(dim, eps=1e-8)
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.network_norm = nn.LayerNorm(dim, eps=1e-8)
        self.network = nn.Sequential(
            nn.Linear(dim, dim), nn.Dropout(dropout), nn.ReLU(), nn.Linear(dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """`(N, D)` from `x` `(N, D)`, the rows of histories of `lengths` back to back."""
        normed = self.attention_norm(x)
        q, (k, v) = self.query(normed), self.key_value(x).chunk(2, dim=-1)
        x = normed + self._attend(q, k, v, lengths)
        normed = self.network_norm(x)
        return normed + self.network(normed)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        # One call a history: nothing is spent on padding, and no history sees another.
        p = self.dropout if self.training else 0.0
        heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(0, 1).split(lengths, dim=1) for t in (q, k, v)]
        rows = [
            F.scaled_dot_product_attention(qi[None], ki[None], vi[None], dropout_p=p, is_causal=True)[0]  # (H, L, D/H)
            for qi, ki, vi in zip(*heads, strict=True)
        ]
        return torch.cat(rows, dim=1).transpose(0, 1).flatten(1) if rows else q


class ComputeClock:
    """Seconds of each `with` block: compute alone, since no rank waits for another inside.

    What a straggler costs shows only where waiting is left out: timed with the collectives, all ranks look alike. On a
    CPU it is the thread's own processor time, since other threads and ranks may share the cores; on a GPU, events.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._start = time.thread_time()
        if torch.cuda.is_initialized():
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()

    def __exit__(self, *_: object) -> None:
        if self._events:
            self._events[-1][1].record()
        else:
            self.seconds.append(time.thread_time() - self._start)

    def take(self) -> list[float]:
        """The times since the last call, in order; waits for the device where there is one."""
        if self._events:
            torch.cuda.synchronize()
            self.seconds += [start.elapsed_time(stop) / 1000 for start, stop in self._events]
            self._events.clear()
        taken, self.seconds = self.seconds, []
        return taken
