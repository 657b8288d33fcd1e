"""Copies between one device and registered host memory, by its copy engines, in streams of our own."""

import torch
from torch import Tensor

from fs_comm import driver

NUM_STREAMS = 2
"""For each direction. A copy and the note that it is done leave a gap before the next; another stream fills it."""

_idle_streams: dict[torch.device, list[list[int]]] = {}
"""Of groups that are gone. Streams are never destroyed: the allocator may still ask them about tensors they used."""


class CudaCopies:
    """Streams 0 to `num_streams` - 1 go to the host, those of the next `num_streams` numbers come from it.

    Args:
        stream_waits: Whether streams may wait on words in host memory, and write them; None tries.
    """

    def __init__(self, device: torch.device, *, stream_waits: bool | None = None) -> None:
        self.device, self.num_streams = device, NUM_STREAMS
        with torch.cuda.device(device):
            torch.cuda.Event().record()  # a thread has no context before its first call
            self._context = driver.current_context()
            idle = _idle_streams.setdefault(device, [])
            self._handles = idle.pop() if idle else [driver.new_stream() for _ in range(2 * NUM_STREAMS)]
        self._streams = [torch.cuda.ExternalStream(handle, device) for handle in self._handles]
        self.last = self._streams[-1]
        """The stream in which an operation ends."""
        self.stream_waits = bool(stream_waits)
        self._registered: list[int] = []
        self._try_waits = stream_waits is None

    def use_in_thread(self) -> None:
        torch.cuda.set_device(self.device)
        driver.set_context(self._context)

    def register(self, address: int, num_bytes: int, word: int) -> int:
        """Pins memory at `address`, and returns where the device sees it.

        The word at offset `word` in it may be used to try whether streams can wait.
        """
        with torch.cuda.device(self.device):
            seen = driver.register(address, num_bytes)
            self._registered.append(address)
            if self._try_waits:
                self._try_waits = False
                self.stream_waits = self._can_wait(seen + word)
        return seen

    def _can_wait(self, word: int) -> bool:
        try:
            self.write(0, word, 0)
            self.wait_until_at_least(0, word, 0)
            self._streams[0].synchronize()
        except driver.DriverError:
            return False
        return True

    def unregister(self) -> None:
        """Memory that streams no longer use."""
        with torch.cuda.device(self.device):
            while self._registered:
                driver.unregister(self._registered.pop())

    def mark_caller(self) -> torch.cuda.Event:
        """What the caller's stream has been given so far, in `begin`'s terms."""
        return _event(torch.cuda.current_stream(self.device))

    def begin(self, after: torch.cuda.Event) -> None:
        """Copies from here on come after `after`: inputs are written then, and outputs no longer in use."""
        for stream in self._streams:
            stream.wait_event(after)

    def put(self, stream: int, address: int, device: int, num_bytes: int) -> None:
        driver.to_host(address, device, num_bytes, self._handles[stream])

    def take(self, stream: int, device: int, address: int, num_bytes: int) -> None:
        driver.to_device(device, address, num_bytes, self._handles[stream])

    def mark(self, stream: int) -> torch.cuda.Event:
        """What the stream has been given so far."""
        return _event(self._streams[stream])

    def join(self) -> None:
        """`last` waits for all copies so far."""
        for stream in self._streams[:-1]:
            self.last.wait_event(_event(stream))

    def end(self) -> torch.cuda.Event:
        """All that `last` was given so far."""
        return _event(self.last)

    def keep(self, tensor: Tensor, *, puts: bool) -> None:
        """The allocator gives the tensor's memory to no one before the copies of a direction so far are done."""
        for stream in self._streams[: self.num_streams] if puts else self._streams[self.num_streams :]:
            tensor.record_stream(stream)

    def wait_until_at_least(self, stream: int, word: int, count: int) -> None:
        """`word`: its address as the device sees it, here and below."""
        driver.wait_until_at_least(self._handles[stream], word, count)

    def wait_until_equal(self, stream: int, word: int, value: int) -> None:
        driver.wait_until_equal(self._handles[stream], word, value)

    def write(self, stream: int, word: int, value: int) -> None:
        """Once what the stream was given so far is done; -1 is `last`."""
        driver.write(self._handles[stream], word, value)

    def close(self) -> None:
        with torch.cuda.device(self.device):
            for stream in self._streams:
                stream.synchronize()
        self.unregister()
        _idle_streams[self.device].append(self._handles)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
