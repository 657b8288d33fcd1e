"""What can go wrong between ranks that balance together.

LoaderError
├── SchemaError      a batch does not fit its schema (this rank's batch; the leaf is named)
├── Disagreement     the ranks differ in their batches, settings or plans
├── RankFailed       a rank's loader, partition function or packing raised
├── RankStopped      a rank left the loop while others went on
└── RankLost         a rank died, or did not answer in time
"""


class LoaderError(RuntimeError):
    """The base of everything that BalancedDataLoader raises about batches and ranks."""


class SchemaError(LoaderError, ValueError):
    """A batch does not split into samples as its schema says; the message names the leaf."""


class Disagreement(LoaderError):
    """Ranks that must agree do not; the message says who differs, and in what."""


class _NamesRanks(LoaderError):
    def __init__(self, ranks: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type["_NamesRanks"], tuple[tuple[int, ...], str]]:
        return type(self), (self.ranks, str(self))


class RankFailed(_NamesRanks):
    """`ranks` raised; the message holds the cause of each."""


class RankStopped(_NamesRanks):
    """`ranks` left the loop (break, exception, exit) while others went on."""


class RankLost(_NamesRanks):
    """`ranks` died or did not answer within the timeout."""
