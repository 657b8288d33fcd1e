"""Prioritized embeddings: row-wise sharded tables whose communication overlaps with compute, bit for bit exact."""

from fs_embed.embedding import PrioritizedEmbedding
from fs_embed.errors import ClosedStep, EmbeddingError, ExchangeTimeout, IdOutOfRange, RanksDisagree
from fs_embed.lookahead import lookahead
from fs_embed.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from fs_embed.rows import TableConfig
from fs_embed.swap import TableOptimizers, prioritize, prioritized_modules, unprioritize

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "ClosedStep",
    "EmbeddingError",
    "ExchangeTimeout",
    "IdOutOfRange",
    "PrioritizedEmbedding",
    "RanksDisagree",
    "RowWiseAdagrad",
    "TableConfig",
    "TableOptimizers",
    "lookahead",
    "prioritize",
    "prioritized_modules",
    "unprioritize",
]
