"""What can go wrong in an exchange. All are `torch.distributed` backend errors, so callers of those catch them.

CommError (torch.distributed.DistBackendError)
├── PeerLost      a peer's process has ended
├── CommTimeout   a peer did not do its part in time
├── Mismatch      ranks asked for different operations or sizes
└── GroupClosed   the group was shut down, or failed before

After any of them the group is of no use; the process is.
"""

import torch.distributed as dist


class CommError(dist.DistBackendError):
    """An exchange failed; the group cannot be used any more, the process can."""


class PeerLost(CommError):
    """A peer no longer answers."""


class CommTimeout(CommError):
    """A peer did not do its part in time."""


class Mismatch(CommError):
    """All ranks must call the same operations in the same order, with sizes that fit."""


class GroupClosed(CommError):
    """Make a new group."""
