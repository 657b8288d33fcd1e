"""What a rank knows of the others while device memory is exchanged: whether they agree, live, and are in time."""

import time
from collections.abc import Sequence

from fs_comm.cuda_job import Job
from fs_comm.errors import CommError, CommTimeout, Mismatch, PeerLost
from fs_comm.mesh import Mesh
from fs_comm.staging import FAILED, LEFT, Layout, Region

_LOST_S = 0.1


class Peers:
    """Reads what the others left in their regions, and their connections.

    Args:
        regions: Of all ranks.
    """

    def __init__(self, mesh: Mesh, regions: Sequence[Region], *, timeout_s: float) -> None:
        self._mesh, self._regions, self._timeout_s = mesh, regions, timeout_s
        self.others = [p for p in range(mesh.size) if p != mesh.rank]
        self.last_end = 0.0
        """When the operation before ended: each has the whole time limit for itself."""
        self._last_look = 0.0

    def agrees(self, job: Job, peer: int) -> bool:
        """Whether the peer takes part in the same operation; False where that is not known yet."""
        mine, theirs = job.views[peer], self._regions[peer].view(self._mesh.rank, job.sequence)
        if theirs is None:
            return False
        if (theirs.op, theirs.dtype) != (mine.op, mine.dtype):
            raise Mismatch(
                f"all ranks must call the same operations in the same order: this rank is at {mine}, "
                f"{self.name_of(peer)} at {theirs}"
            )
        if theirs.num_bytes != mine.expected:
            raise Mismatch(
                f"{mine}: this rank expects {mine.expected} bytes of {self.name_of(peer)}, which has "
                f"{theirs.num_bytes} for it: sizes and splits of all ranks must fit"
            )
        if theirs.expected != mine.num_bytes:
            raise Mismatch(
                f"{mine}: this rank has {mine.num_bytes} bytes for {self.name_of(peer)}, which expects "
                f"{theirs.expected}: sizes and splits of all ranks must fit"
            )
        return True

    def all_agree(self, job: Job) -> bool:
        return all(self.agrees(job, peer) for peer in self.others)

    def look_after(self, job: Job) -> None:
        """Raises what will keep the operation from ending."""
        now = time.monotonic()
        lost: dict[int, str] = {}
        if now - self._last_look > _LOST_S:
            self._last_look, lost = now, self._mesh.lost()
        for peer in [*self.others, self._mesh.rank]:
            state = self._regions[peer].word(Layout.state)
            if state == FAILED:
                raise CommError(f"{self.name_of(peer)} gave the group up: {self._regions[peer].failure()}")
            self.agrees(job, peer)
            if (state == LEFT or peer in lost) and not self._regions[peer].reached(Layout.done, job.sequence):
                why = "it has shut its group down while others still use theirs" if state == LEFT else lost[peer]
                raise PeerLost(f"{job}: {self.name_of(peer)} is lost: {why}")
        if now - max(job.since, self.last_end) > self._timeout_s:
            behind = [p for p in self.others if self._regions[p].view(self._mesh.rank, job.sequence) is None]
            late = [p for p in self.others if not self._regions[p].reached(Layout.done, job.sequence)]
            names = ", ".join(self.name_of(p) for p in behind or late) or "this rank's own device"
            what = "which did not take part in time" if behind else "whose bytes did not come in time"
            raise CommTimeout(f"{job}: waited {self._timeout_s:.0f} s for {names}, {what}")

    def name_of(self, peer: int) -> str:
        return self._mesh.name_of(peer) if peer != self._mesh.rank else "this rank itself"
