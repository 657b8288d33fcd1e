"""AllGather and AllToAll over verbs links: tensors cut into messages, all peers side by side, one thread.

Sizes are agreed before: both ends of a flow know its bytes, so a message needs no header of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fs_comm.errors import CommTimeout, PeerLost
from fs_comm.transports.verbs import VerbsTransport
from fs_comm.transports.verbs_link import VerbsLink
from fs_comm.transports.verbs_schedule import pairwise_all_to_all, ring_all_gather


@dataclass(eq=False)
class Flow:
    """Bytes on their way to or from one peer: `buffer` is `(num_bytes,)` uint8, contiguous, on any device.

    `after`: no more may be sent on than what that flow has received.
    """

    peer: int
    buffer: Tensor
    after: "Flow | None" = None
    done: int = 0

    @property
    def left(self) -> int:
        return self.buffer.numel() - self.done

    def ready(self) -> int:
        """Bytes that may be sent now."""
        return self.left if self.after is None else self.after.done - self.done


def all_gather(
    transport: VerbsTransport,
    rank: int,
    blocks: Sequence[Tensor],
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Fill every other rank's block from its owner's, around the ring.

    Args:
        transport: with links to both neighbours at least.
        rank: this rank; its own block is the input.
        blocks: by rank, `(bytes of that rank,)` uint8; the sizes may differ and are the same on all ranks.
        timeout_s: for all of it.
        check: see `exchange`.

    Raises:
        PeerLost, CommTimeout: see `exchange`.
    """
    sends, receives = ring_flows(rank, blocks)
    exchange(transport, sends, receives, timeout_s=timeout_s, check=check)


def ring_flows(rank: int, blocks: Sequence[Tensor]) -> tuple[list[Flow], list[Flow]]:
    """What `all_gather` sends and receives."""
    sends: list[Flow] = []
    receives: list[Flow] = []
    for k, step in enumerate(ring_all_gather(rank, len(blocks))):
        sends.append(Flow(step.send_to, blocks[step.send_block], after=receives[k - 1] if k else None))
        receives.append(Flow(step.receive_from, blocks[step.receive_block]))
    return sends, receives


def all_to_all(
    transport: VerbsTransport, rank: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, timeout_s: float
) -> None:
    """`inputs[p]` of rank r becomes `outputs[r]` of rank p, pairwise; `(bytes,)` uint8 each, any of them empty.

    Raises:
        PeerLost, CommTimeout: see `exchange`.
    """
    sends: list[Flow] = []
    receives: list[Flow] = []
    for step in pairwise_all_to_all(rank, len(inputs)):
        sends.append(Flow(step.send_to, inputs[step.send_block]))
        receives.append(Flow(step.receive_from, outputs[step.receive_block]))
    outputs[rank].copy_(inputs[rank])
    exchange(transport, sends, receives, timeout_s=timeout_s)


def exchange(
    transport: VerbsTransport,
    sends: Sequence[Flow],
    receives: Sequence[Flow],
    *,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Move all bytes; flows of one peer go one after the other, flows of several peers side by side.

    Returns when everything has arrived here and everything was posted; the input may then be changed, since what is on
    its way is in the transport's slots. `check` is called before each wait, so at each heartbeat at least; what it
    raises ends the exchange.

    Raises:
        PeerLost: a peer is gone, or has closed its end while something was still expected of it.
        CommTimeout: the time is up; the text names who was waited for, and for how many bytes.
    """
    deadline = time.monotonic() + timeout_s
    sends, receives = [f for f in sends if f.left], [f for f in receives if f.left]
    while sends or receives:
        moved = move(transport, sends, receives)
        sends, receives = [f for f in sends if f.left], [f for f in receives if f.left]
        if not moved:
            _check_still_there(transport, receives)
            check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CommTimeout(f"verbs: not done within {timeout_s} s: {_describe(transport, sends, receives)}")
            transport.wait(left_s)
        transport.progress()


def move(transport: VerbsTransport, sends: Sequence[Flow], receives: Sequence[Flow]) -> bool:
    """What can be moved without waiting; whether anything was. The transport is to make progress between two calls."""
    moved = False
    for flow in _first_of_each_peer([f for f in sends if f.left]):
        moved |= _send(transport.links[flow.peer], flow)
    for flow in _first_of_each_peer([f for f in receives if f.left]):
        moved |= _receive(transport.links[flow.peer], flow)
    return moved


def _first_of_each_peer(flows: Sequence[Flow]) -> list[Flow]:
    return list({flow.peer: flow for flow in reversed(flows)}.values())


def _send(link: VerbsLink, flow: Flow) -> bool:
    """Fill and post slots while there are bytes and credits; whether any was."""
    begun = flow.done
    while (size := min(link.slot_bytes, flow.ready())) and (slot := link.acquire()) is not None:
        torch.frombuffer(slot, dtype=torch.uint8)[:size].copy_(flow.buffer[flow.done : flow.done + size])
        link.post(size)
        flow.done += size
    return flow.done > begun


def _receive(link: VerbsLink, flow: Flow) -> bool:
    """Empty the slots that came, as far as they are this flow's; whether any was."""
    begun = flow.done
    while flow.left and (message := link.arrived()) is not None:
        flow.buffer[flow.done : flow.done + len(message)].copy_(torch.frombuffer(message, dtype=torch.uint8))
        flow.done += len(message)
        link.release()
    return flow.done > begun


def _check_still_there(transport: VerbsTransport, receives: Sequence[Flow]) -> None:
    for flow in receives:
        if transport.links[flow.peer].departed:
            name = transport.links[flow.peer].name
            raise PeerLost(f"{name} has closed its end of the verbs link with {flow.left} bytes not sent")


def _describe(transport: VerbsTransport, sends: Sequence[Flow], receives: Sequence[Flow]) -> str:
    parts = [f"{flow.left} bytes to {transport.links[flow.peer].name}" for flow in sends]
    parts += [f"{flow.left} bytes from {transport.links[flow.peer].name}" for flow in receives]
    return ", ".join(parts)
