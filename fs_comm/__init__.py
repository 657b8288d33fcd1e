"""AllGather and AllToAll that use no streaming multiprocessor: copy engine, host transport, copy engine."""

from fs_comm.errors import CommError, CommTimeout, GroupClosed, Mismatch, PeerLost
from fs_comm.group import SmFreeGroup, lost_ranks, new_group, register

__all__ = [
    "CommError",
    "CommTimeout",
    "GroupClosed",
    "Mismatch",
    "PeerLost",
    "SmFreeGroup",
    "lost_ranks",
    "new_group",
    "register",
]

register()  # so that `init_process_group("smfree")` finds it, as other packages' backends are found
