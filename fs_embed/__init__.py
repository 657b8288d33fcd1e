"""Prioritized embeddings: row-wise sharded tables whose communication overlaps with compute, bit for bit exact."""

from fs_embed.bag import PrioritizedEmbeddingBag
from fs_embed.bag_collection import PrioritizedEmbeddingBagCollection
from fs_embed.collection import JaggedRows, PrioritizedEmbeddingCollection
from fs_embed.embedding import PrioritizedEmbedding
from fs_embed.errors import ClosedStep, EmbeddingError, ExchangeTimeout, IdOutOfRange, RanksDisagree, StaleRow
from fs_embed.lookahead import lookahead
from fs_embed.module import PrioritizedModule
from fs_embed.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from fs_embed.rows import TableConfig
from fs_embed.swap import prioritize, prioritized_modules, unprioritize
from fs_embed.table_optimizers import TableOptimizers

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "ClosedStep",
    "EmbeddingError",
    "ExchangeTimeout",
    "IdOutOfRange",
    "JaggedRows",
    "PrioritizedEmbedding",
    "PrioritizedEmbeddingBag",
    "PrioritizedEmbeddingBagCollection",
    "PrioritizedEmbeddingCollection",
    "PrioritizedModule",
    "RanksDisagree",
    "RowWiseAdagrad",
    "StaleRow",
    "TableConfig",
    "TableOptimizers",
    "lookahead",
    "prioritize",
    "prioritized_modules",
    "unprioritize",
]


def __getattr__(name: str) -> object:
    """TorchRec's sharders: what needs TorchRec is imported when it is asked for."""
    if name in ("PrioritizedEmbeddingBagCollectionSharder", "PrioritizedEmbeddingCollectionSharder"):
        try:
            from fs_embed import torchrec
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{name} needs torchrec, as `pip install freescale[torchrec]` has it") from error
        return getattr(torchrec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
