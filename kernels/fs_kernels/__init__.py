"""Operations on jagged tensors: a torch reference each, and a Triton kernel beside it."""

from fs_kernels._dispatch import Impl
from fs_kernels.collision_split import collision_split
from fs_kernels.jagged_permute import jagged_permute
from fs_kernels.keyed_transpose import keyed_transpose
from fs_kernels.merge_rows import merge_rows
from fs_kernels.ranged_exchange import ranged_combine, ranged_dispatch
from fs_kernels.row_updates import adagrad_update_, adam_update_, rowwise_adagrad_update_, sgd_update_
from fs_kernels.segment_sum import segment_sum

__all__ = [
    "Impl",
    "adagrad_update_",
    "adam_update_",
    "collision_split",
    "jagged_permute",
    "keyed_transpose",
    "merge_rows",
    "ranged_combine",
    "ranged_dispatch",
    "rowwise_adagrad_update_",
    "segment_sum",
    "sgd_update_",
]
