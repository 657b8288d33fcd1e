"""The plan of an exchange of device memory through staging memory: which chunk goes where, and when it may.

Each rank owns *lanes* of staging memory: one to each rank, itself too, for AllToAll, and one that all ranks read, for
AllGather. A lane is a ring of slots; its chunks are numbered from the group's first. The owner *puts* a chunk once the
one before it in the slot was taken by all its readers; a reader *takes* it once it is there.

Every rank carries its steps out in the order planned here, with all puts in one stream and all takes in another. A
step waits for none but earlier steps of the peers' orders, so that an exchange ends even where the device works all
streams off in one queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`), and whatever else each rank has queued behind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fs_comm.wire import Op


@dataclass(frozen=True, slots=True)
class Put:
    """Copies `sends[part][start:start + num_bytes]` into this rank's staging memory."""

    lane: int
    number: int
    part: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Take:
    """Fills `receives[owner][start:start + num_bytes]` from the owner's staging memory."""

    owner: int
    lane: int
    number: int
    start: int
    num_bytes: int


Step = Put | Take


class Planner:
    """Plans one rank's exchanges, one after the other; holds how many chunks went over each lane.

    Args:
        num_slots: Of each lane.
    """

    def __init__(self, rank: int, size: int, *, slot_bytes: int, num_slots: int) -> None:
        self.rank, self.size, self.slot_bytes, self.num_slots = rank, size, slot_bytes, num_slots
        self.num_put = [0] * (size + 1)
        """By lane of this rank."""
        self.num_taken = [[0, 0] for _ in range(size)]
        """By owner: of its lane to this rank, and of its lane to all."""

    @property
    def lane_to_all(self) -> int:
        return self.size

    def readers(self, lane: int) -> range:
        return range(self.size) if lane == self.lane_to_all else range(lane, lane + 1)

    def steps(self, op: Op, send_bytes: Sequence[int], receive_bytes: Sequence[int]) -> list[Step]:
        """One exchange's steps. `send_bytes`, `receive_bytes`: `(size,)`, this rank's own included."""
        gathers = op == Op.ALL_GATHER
        # The rank after this one is served first and the one before this one read first, itself last: so all begin
        # with another peer, and take in the order in which things are put.
        to = [self.rank] if gathers else [(self.rank + k) % self.size for k in range(1, self.size + 1)]
        of = [(self.rank - k) % self.size for k in range(1, self.size + 1)]
        longest = max([send_bytes[p] for p in to] + [receive_bytes[p] for p in of])
        steps: list[Step] = []
        for start in range(0, longest, self.slot_bytes):
            for peer in to:
                if start < send_bytes[peer]:
                    lane = self.lane_to_all if gathers else peer
                    n = min(self.slot_bytes, send_bytes[peer] - start)
                    steps.append(Put(lane, self.num_put[lane], peer, start, n))
                    self.num_put[lane] += 1
            for owner in of:
                if start < receive_bytes[owner]:
                    n = min(self.slot_bytes, receive_bytes[owner] - start)
                    lane = self.lane_to_all if gathers else self.rank
                    steps.append(Take(owner, lane, self.num_taken[owner][gathers], start, n))
                    self.num_taken[owner][gathers] += 1
        return steps

    def must_be_taken(self, put: Put) -> int:
        """How many chunks of its lane every reader must have taken before this one may be put."""
        return max(0, put.number + 1 - self.num_slots)

    def slot(self, step: Step) -> int:
        return step.number % self.num_slots
