"""Exchanges of device memory between ranks of one host: copy engine, shared staging memory, copy engine.

The sender's copy engine writes a chunk into staging memory that both ranks map and have registered, the receiver's
reads it: no copy by a processor, no kernel. What stays on its rank goes the same way. Two modes speak one protocol
(words in the staging memory), so ranks need not agree on one:

- *Streams wait* (`cuStreamWaitValue32`): the caller enqueues the whole exchange, with its waits for words of the peers.
  No thread takes part in moving data; the interpreter may be busy.
- *Thread waits*: a thread looks at the words, and gives the streams a copy once it may start. `Work.wait` then blocks
  until the last copy was given.

A thread of its own, asleep while nothing is under way, watches over peers and time in both modes. When something fails
it writes the words that this rank's streams wait for, until they have run dry.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fs_comm.chunks import Planner, Put, Take
from fs_comm.cuda_job import Copies, Event, Job
from fs_comm.cuda_peers import Peers
from fs_comm.errors import CommTimeout, GroupClosed
from fs_comm.mesh import Mesh
from fs_comm.staging import LEFT, RING, WORD, Layout, Region, View
from fs_comm.wire import Op

_WATCH_S = 0.005


class CudaEngine:
    """Runs one rank's exchanges in the order in which they are asked for.

    Args:
        mesh: To notice that a peer's process has ended; the engine closes it.
        regions: Of all ranks; registered with `copies`.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        regions: list[Region],
        copies: Copies,
        device: torch.device,
        *,
        timeout_s: float,
    ) -> None:
        self.rank, self.size, self.timeout_s = mesh.rank, mesh.size, timeout_s
        self.copies, self.device = copies, device
        self._mesh, self._layout, self._regions = mesh, layout, regions
        self._own = regions[mesh.rank]
        self._planner = Planner(mesh.rank, mesh.size, slot_bytes=layout.slot_bytes, num_slots=layout.num_slots)
        self._peers = Peers(mesh, regions, timeout_s=timeout_s)
        self._sequence = 0
        self._failed: BaseException | None = None
        self._closing = False
        self._under_way: deque[Job] = deque()
        self._submitting = threading.Lock()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="fs_comm_cuda", daemon=True)
        self._thread.start()

    # On the caller's thread.

    def submit(
        self, op: Op, dtype: int, sends: Sequence[Tensor], receives: Sequence[Tensor], finish: Callable[[], None] | None
    ) -> Job:
        """Starts an exchange; does not wait for any rank while fewer than `RING` are under way.

        Args:
            sends: One tensor for each rank, contiguous, on the device; for AllGather the same each time.
            receives: One for each rank, contiguous.
            finish: Enqueues what is left to do once all bytes are there; the current stream is then that of the copies.
        """
        with self._submitting:
            self.check()
            if self._closing:
                raise GroupClosed("the group was shut down; make a new one")
            sequence = self._sequence + 1
            send_bytes = [t.numel() * t.element_size() for t in sends]
            receive_bytes = [t.numel() * t.element_size() for t in receives]
            views = [View(sequence & WORD, op, dtype, send_bytes[p], receive_bytes[p]) for p in range(self.size)]
            self._make_room(sequence, views[0])
            self._sequence = sequence
            for peer in range(self.size):
                self._own.publish(peer, views[peer])
            job = Job(sequence, views, self._planner.steps(op, send_bytes, receive_bytes), sends, receives, finish)
            job.after = self.copies.mark_caller()
            job.since = time.monotonic()
            with self._changed:  # before the streams are given anything that they might have to be released from
                self._under_way.append(job)
                self._changed.notify()
            if self.copies.stream_waits:
                self._enqueue(job)
            return job

    def check(self) -> None:
        """Raises if an operation has failed."""
        if self._failed is not None:
            raise GroupClosed(f"the group failed before and is of no use any more: {self._failed}") from self._failed

    def _make_room(self, sequence: int, view: View) -> None:
        """The ring holds what peers may still look at."""
        deadline = time.monotonic() + self.timeout_s
        oldest = sequence - RING
        while oldest > 0 and not all(r.reached(Layout.done, oldest) for r in self._regions):
            self.check()
            if time.monotonic() > deadline:
                raise CommTimeout(f"{view}: {RING} operations are under way, none ended in {self.timeout_s:.0f} s")
            time.sleep(0.0005)

    def _enqueue(self, job: Job) -> None:
        """The whole exchange, in the plan's order; words that are there already need no wait."""
        try:
            self._enqueue_steps(job)
        except BaseException as error:
            self._failed = self._failed or error
            raise
        finally:
            job.given.set()

    def _enqueue_steps(self, job: Job) -> None:
        copies, layout = self.copies, self._layout
        copies.begin(job.after)
        for peer in [*self._peers.others, self.rank]:  # no byte is taken of a peer that sees another operation
            region, word = self._regions[peer], layout.signature(self.rank, job.sequence)
            expected = job.views[peer].signature_of_peer()
            if region.word(word) != expected:
                copies.wait_until_equal(self._takes_of(peer), region.device_address + word, expected)
        for step in job.steps:
            if isinstance(step, Put):
                stream, count = self._puts_to(step.lane), self._planner.must_be_taken(step)
                for reader in self._planner.readers(step.lane) if count else ():
                    word = layout.taken(step.lane, reader)
                    if not self._own.reached(word, count):
                        copies.wait_until_at_least(stream, self._own.device_address + word, count)
                self._put(job, step)
                copies.write(stream, self._own.device_address + layout.ready(step.lane), step.number + 1)
            else:
                stream, region = self._takes_of(step.owner), self._regions[step.owner]
                word = layout.ready(step.lane)
                if not region.reached(word, step.number + 1):
                    copies.wait_until_at_least(stream, region.device_address + word, step.number + 1)
                self._take(job, step)
                word = layout.taken(step.lane, self.rank)
                copies.write(stream, region.device_address + word, step.number + 1)
        copies.join()
        if job.finish is not None:
            job.finish()
        copies.write(-1, self._own.device_address + Layout.done, job.sequence)
        for tensors, puts in ((job.sends, True), (job.receives, False)):
            for tensor in {t.untyped_storage().data_ptr(): t for t in tensors}.values():
                copies.keep(tensor, puts=puts)
        job.sends = job.receives = ()
        job.event = copies.end()

    def _puts_to(self, lane: int) -> int:
        """The stream of a lane: always the same, so that counts come in order."""
        return lane % self.copies.num_streams

    def _takes_of(self, owner: int) -> int:
        return self.copies.num_streams + owner % self.copies.num_streams

    def _put(self, job: Job, step: Put) -> None:
        slot = self._own.address + self._layout.slot(step.lane, self._planner.slot(step))
        source = job.sends[step.part].data_ptr() + step.start
        self.copies.put(self._puts_to(step.lane), slot, source, step.num_bytes)

    def _take(self, job: Job, step: Take) -> None:
        slot = self._regions[step.owner].address + self._layout.slot(step.lane, self._planner.slot(step))
        target = job.receives[step.owner].data_ptr() + step.start
        self.copies.take(self._takes_of(step.owner), target, slot, step.num_bytes)

    def close(self) -> None:
        """Lets what is under way end, then leaves; waits a timeout at most, and may be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.timeout_s)

    def abort(self) -> None:
        """Fails what is under way, here and at the peers."""
        self._failed = self._failed or GroupClosed("the group was aborted")
        self.close()

    def close_sockets(self) -> None:
        """In a forked child: peers would not see this process end."""
        for s in self._mesh.sockets.values():
            s.close()

    # On the engine's thread.

    def _watch(self) -> None:
        self.copies.use_in_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._closing)
                if not self._under_way:
                    break
                job = self._under_way[0]
            try:
                if self._failed is not None:
                    raise self._failed
                self._carry(job)
            except BaseException as error:
                self._fail(error)
            with self._changed:
                self._under_way.popleft()
            self._peers.last_end = time.monotonic()
            del job  # an idle thread must hold no tensors
        self._leave()

    def _carry(self, job: Job) -> None:
        """Returns when all copies are done and all ranks agreed; in the mode without waiting streams, does them."""
        if not self.copies.stream_waits:
            self._by_thread(job)
        else:
            time.sleep(_WATCH_S)  # the caller wants the interpreter now, and most exchanges need no more
        while not (job.given.is_set() and job.event is not None and job.event.query()):
            self._check(job)
            time.sleep(_WATCH_S)
        self._check(job)
        job.sends = job.receives = ()

    def _by_thread(self, job: Job) -> None:
        """Gives the streams each copy once it may start, and tells of it once it is done."""
        self.copies.begin(job.after)
        puts = deque(s for s in job.steps if isinstance(s, Put))
        takes = deque(s for s in job.steps if isinstance(s, Take))
        started: dict[int, deque[tuple[Event, Region, int, int]]] = {
            stream: deque() for stream in range(2 * self.copies.num_streams)
        }
        idle = 0
        while (
            puts
            or takes
            or any(started.values())
            or not all(self._peers.agrees(job, peer) for peer in self._peers.others)
        ):
            idle += 1
            for copies in started.values():
                while copies and copies[0][0].query():
                    _, region, word, count = copies.popleft()
                    region.set_word(word, count)
                    idle = 0
            if puts and self._may_put(puts[0]):
                step = puts.popleft()
                self._put(job, step)
                stream, word = self._puts_to(step.lane), self._layout.ready(step.lane)
                started[stream].append((self.copies.mark(stream), self._own, word, step.number + 1))
                idle = 0
            if takes and self._may_take(job, takes[0]):
                step = takes.popleft()
                self._take(job, step)
                stream, word = self._takes_of(step.owner), self._layout.taken(step.lane, self.rank)
                started[stream].append((self.copies.mark(stream), self._regions[step.owner], word, step.number + 1))
                idle = 0
            if idle:
                self._check(job)
                time.sleep(0.0 if idle < 100 else 0.00005)  # others want the interpreter, too
        self.copies.join()
        if job.finish is not None:
            job.finish()
        job.event = self.copies.end()
        self._own.set_word(Layout.done, job.sequence)
        job.given.set()

    def _may_put(self, step: Put) -> bool:
        count = self._planner.must_be_taken(step)
        return all(
            self._own.reached(self._layout.taken(step.lane, reader), count)
            for reader in (self._planner.readers(step.lane) if count else ())
        )

    def _may_take(self, job: Job, step: Take) -> bool:
        is_there = self._regions[step.owner].reached(self._layout.ready(step.lane), step.number + 1)
        return is_there and self._peers.agrees(job, step.owner)

    def _check(self, job: Job) -> None:
        """Raises what will keep the operation from ending."""
        if self._failed is not None:
            raise self._failed
        self._peers.look_after(job)

    def _fail(self, error: BaseException) -> None:
        """Ends all that is under way with the error, and lets the streams go."""
        if self._failed is None:
            self._failed = error
        jobs = list(self._under_way)
        self._own.fail(f"{jobs[0]}: {self._failed}")
        for job in jobs:  # before streams go on without their bytes
            job.error = job.error or self._failed
        self._drain()
        for job in jobs:
            job.given.set()

    def _drain(self) -> None:
        """Returns once the streams are done with all that they were given, and may be given by callers under way."""
        last: Event | None = None
        try:
            while last is None or not last.query():
                jobs = list(self._under_way)
                if self.copies.stream_waits:
                    self._release(jobs)
                if last is None and (not self.copies.stream_waits or all(job.given.is_set() for job in jobs)):
                    self.copies.join()
                    last = self.copies.end()
                time.sleep(0.001)
        except RuntimeError:
            pass  # the device itself has failed: its streams wait for nothing any more

    def _release(self, jobs: Sequence[Job]) -> None:
        """Sets every word that this rank's streams may wait for. Peers may still write them: it takes repeating."""
        layout, planner = self._layout, self._planner
        for owner, region in enumerate(self._regions):
            to_me, to_all = planner.num_taken[owner]
            region.set_word(layout.ready(self.rank), to_me)
            region.set_word(layout.ready(planner.lane_to_all), to_all)
            for job in jobs:
                region.set_word(layout.signature(self.rank, job.sequence), job.views[owner].signature_of_peer())
        for lane in range(self.size + 1):
            for reader in planner.readers(lane):
                self._own.set_word(layout.taken(lane, reader), planner.num_put[lane])

    def _leave(self) -> None:
        if self._failed is None:
            self._own.set_word(Layout.state, LEFT)
        else:
            self._own.fail(str(self._failed))
        self._mesh.close(None)
        self.copies.close()
        for region in self._regions:
            region.close()
