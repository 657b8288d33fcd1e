"""Data-loader-centric balancing of sequence batches across ranks, and parquet histories to feed it."""

from fs_data.audit import AuditReport
from fs_data.errors import Disagreement, LoaderError, RankFailed, RankLost, RankStopped, SchemaError
from fs_data.feeds import IdConsumer
from fs_data.jagged import JaggedColumn, NestedColumn
from fs_data.leaves import Dense, Derived, Group, Jagged, Keyed, Nested, Objects, PerBatch
from fs_data.loader import BalancedDataLoader
from fs_data.offline import rebuild
from fs_data.parquet import ParquetUIHDataset
from fs_data.plan import Assignment, RuntimeInfo, WorldBatch
from fs_data.schema import BatchSchema
from fs_data.shuffle_plan import Features
from fs_data.stats import LoaderStats, StepStats

__all__ = [
    "Assignment",
    "AuditReport",
    "BalancedDataLoader",
    "BatchSchema",
    "Dense",
    "Derived",
    "Disagreement",
    "Features",
    "Group",
    "IdConsumer",
    "Jagged",
    "JaggedColumn",
    "Keyed",
    "LoaderError",
    "LoaderStats",
    "Nested",
    "NestedColumn",
    "Objects",
    "ParquetUIHDataset",
    "PerBatch",
    "RankFailed",
    "RankLost",
    "RankStopped",
    "RuntimeInfo",
    "SchemaError",
    "StepStats",
    "WorldBatch",
    "rebuild",
]
