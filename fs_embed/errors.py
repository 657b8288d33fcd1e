"""What can go wrong.

EmbeddingError (RuntimeError)
├── IdOutOfRange       an id is not a row of its table, on some rank
├── RanksDisagree      ranks called the module differently: order, number or kind of calls
├── ClosedStep         a backward came after its step had ended
├── StaleRow           a row was used that is older than its owner's: a fault of this package, where it looks for one
└── ExchangeTimeout    nothing came from the other ranks in time
"""


class EmbeddingError(RuntimeError):
    """Base of all errors of fs_embed that are not plain wrong arguments."""


class IdOutOfRange(EmbeddingError):
    """Raised on every rank, so that none waits for the one with the bad id."""


class RanksDisagree(EmbeddingError):
    """Every rank must make the same calls in the same order."""


class ClosedStep(EmbeddingError):
    """Each forward takes one backward, before the next forward."""


class StaleRow(EmbeddingError):
    """Raised on every rank, by tables that check versions (`check_versions=True`); results are not to be trusted."""


class ExchangeTimeout(EmbeddingError):
    """The text says what was waited for."""
