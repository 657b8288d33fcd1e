"""The plan for device memory: every byte arrives once, and no order of queues and ranks brings it to a halt."""

import random
from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fs_comm.chunks import Planner, Put, Step
from fs_comm.staging import RING, WORD, Layout, View
from fs_comm.wire import Op

SLOT_BYTES, NUM_SLOTS = 4, 2


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, list[tuple[Op, list[list[int]]]]]:
    """A number of ranks, and operations on them: what rank r has for rank p, in bytes, at [r][p]."""
    size = draw(st.integers(1, 4))
    num_bytes = st.sampled_from([0, 1, 3, 4, 5, 8, 9, 40])
    ops: list[tuple[Op, list[list[int]]]] = []
    for op in draw(st.lists(st.sampled_from(Op), min_size=1, max_size=4)):
        if op == Op.ALL_GATHER:
            ops.append((op, [[draw(num_bytes)] * size] * size))
        else:
            ops.append((op, [[draw(num_bytes) for _ in range(size)] for _ in range(size)]))
    return size, ops


@given(exchanges(), st.booleans(), st.integers(0, 2**32))
def test_every_byte_arrives_whatever_rank_runs_first_and_also_with_one_queue(
    case: tuple[int, list[tuple[Op, list[list[int]]]]], one_queue: bool, seed: int
) -> None:
    size, ops = case
    planners = [Planner(r, size, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS) for r in range(size)]
    queues: list[deque[tuple[int, int, Step]]] = []  # (operation, rank, step) in the order of the device's queues
    received = [[[bytearray(have[p][r]) for p in range(size)] for r in range(size)] for _, have in ops]
    for rank, planner in enumerate(planners):
        steps = [
            (n, rank, step)
            for n, (op, have) in enumerate(ops)
            for step in planner.steps(op, have[rank], [have[p][rank] for p in range(size)])
        ]
        if one_queue:
            queues.append(deque(steps))
        else:
            queues += [deque(s for s in steps if isinstance(s[2], Put) == puts) for puts in (True, False)]
    content = {
        (n, r, p): random.Random(f"{n}{r}{p if op == Op.ALL_TO_ALL else 0}").randbytes(have[r][p])
        for n, (op, have) in enumerate(ops)
        for r in range(size)
        for p in range(size)
    }
    slots: dict[tuple[int, int, int], bytes] = {}
    ready = [[0] * (size + 1) for _ in range(size)]
    taken = [[[0] * size for _ in range(size + 1)] for _ in range(size)]
    order = random.Random(seed)
    while any(queues):
        runnable: list[deque[tuple[int, int, Step]]] = []
        for queue in queues:
            if queue:
                _, rank, step = queue[0]
                if isinstance(step, Put):
                    need = planners[rank].must_be_taken(step)
                    if all(taken[rank][step.lane][p] >= need for p in planners[rank].readers(step.lane)):
                        runnable.append(queue)
                elif ready[step.owner][step.lane] > step.number:
                    runnable.append(queue)
        assert runnable, f"all wait: {[q[0] for q in queues if q]}"
        n, rank, step = order.choice(runnable).popleft()
        assert 0 < step.num_bytes <= SLOT_BYTES
        stop = step.start + step.num_bytes
        if isinstance(step, Put):
            slots[rank, step.lane, planners[rank].slot(step)] = content[n, rank, step.part][step.start : stop]
            ready[rank][step.lane] = step.number + 1
        else:
            received[n][rank][step.owner][step.start : stop] = slots[step.owner, step.lane, planners[rank].slot(step)]
            taken[step.owner][step.lane][rank] = step.number + 1
    for n in range(len(ops)):
        for r in range(size):
            for p in range(size):
                assert received[n][r][p] == content[n, p, r]


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([4096, 65536]))
def test_no_two_things_of_a_region_share_a_byte(size: int, num_slots: int, slot_bytes: int) -> None:
    layout = Layout(size, slot_bytes, num_slots)
    words = [layout.state, layout.done, layout.scratch, *(layout.ready(lane) for lane in range(size + 1))]
    words += [layout.taken(lane, lane) for lane in range(size)] + [layout.taken(size, p) for p in range(size)]
    spans = [(word, 64) for word in words] + [(layout.text, 2048)]
    for peer in range(size):
        spans += [(layout.signature(peer, n), 4) for n in range(RING)]
        spans += [(layout.view(peer, n), View.FORMAT.size) for n in range(RING)]
    spans += [(layout.slot(lane, s), slot_bytes) for lane in range(size + 1) for s in range(num_slots)]
    spans.sort()
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout.num_bytes
    assert layout.slot(0, 0) % 4096 == 0


def test_a_signature_is_that_of_the_peer_exactly_where_both_see_the_same_bytes() -> None:
    mine = View(7, Op.ALL_TO_ALL, 3, 100, 60)
    assert mine.signature_of_peer() == View(7, Op.ALL_TO_ALL, 3, 60, 100).signature()
    others = [
        View(8, Op.ALL_TO_ALL, 3, 60, 100),
        View(7, Op.ALL_GATHER, 3, 60, 100),
        View(7, Op.ALL_TO_ALL, 4, 60, 100),
        View(7, Op.ALL_TO_ALL, 3, 61, 100),
        View(7, Op.ALL_TO_ALL, 3, 60, 101),
    ]
    assert mine.signature_of_peer() not in [v.signature() for v in others]
    assert View(WORD, Op.ALL_GATHER, 0, 0, 0).signature()
