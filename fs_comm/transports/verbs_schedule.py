"""Who sends which block to whom, in which round: ring for AllGather, pairwise for AllToAll. Numbers only.

Both keep every rank's link busy in both directions with one peer each way, so no receiver is flooded by all others at
once. The ring passes each block on, so that a rank speaks to its two neighbours alone: where neighbours share a host,
each block crosses the network once a host instead of once a rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One round of one rank. A block is named by the rank that it comes from (AllGather) or goes to (AllToAll)."""

    send_to: int
    send_block: int
    receive_from: int
    receive_block: int


def ring_all_gather(rank: int, world_size: int) -> list[Step]:
    """N-1 rounds; what a rank receives in one round it sends on in the next, beginning with its own block."""
    _check(rank, world_size)
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    return [
        Step(
            send_to=ahead,
            send_block=(rank - k) % world_size,
            receive_from=behind,
            receive_block=(behind - k) % world_size,
        )
        for k in range(world_size - 1)
    ]


def pairwise_all_to_all(rank: int, world_size: int) -> list[Step]:
    """N-1 rounds; in round k each rank sends to the rank k after it and receives from the rank k before it.

    The block sent is the peer's; the block received is the peer's too: its place in the output.
    """
    _check(rank, world_size)
    steps: list[Step] = []
    for k in range(1, world_size):
        to, source = (rank + k) % world_size, (rank - k) % world_size
        steps.append(Step(send_to=to, send_block=to, receive_from=source, receive_block=source))
    return steps


def _check(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} for {world_size} ranks, got {rank}")
