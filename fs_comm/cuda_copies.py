"""Copies between one device and registered host memory, by its copy engines, in two streams of our own."""

import torch
from torch import Tensor

from fs_comm import driver

_idle_streams: dict[torch.device, list[tuple[int, int]]] = {}
"""Of groups that are gone. Streams are never destroyed: the allocator may still ask them about tensors they used."""


class CudaCopies:
    """One stream for what goes to the host, one for what comes from it.

    Args:
        stream_waits: Whether streams may wait on words in host memory, and write them; None tries.
    """

    def __init__(self, device: torch.device, *, stream_waits: bool | None = None) -> None:
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.Event().record()  # a thread has no context before its first call
            self._context = driver.current_context()
            idle = _idle_streams.setdefault(device, [])
            self._put, self._take = idle.pop() if idle else (driver.new_stream(), driver.new_stream())
        self._puts = torch.cuda.ExternalStream(self._put, device)
        self.takes = torch.cuda.ExternalStream(self._take, device)
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
            driver.write(self._put, word, 0)
            driver.wait_until_at_least(self._put, word, 0)
            self._puts.synchronize()
        except driver.DriverError:
            return False
        return True

    def mark_caller(self) -> torch.cuda.Event:
        """What the caller's stream has been given so far, in `begin`'s terms."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def begin(self, after: torch.cuda.Event) -> None:
        """Copies from here on come after `after`: inputs are written then, and outputs no longer in use."""
        self._puts.wait_event(after)
        self.takes.wait_event(after)

    def put(self, address: int, device: int, num_bytes: int) -> None:
        driver.to_host(address, device, num_bytes, self._put)

    def take(self, device: int, address: int, num_bytes: int) -> None:
        driver.to_device(device, address, num_bytes, self._take)

    def mark(self, *, puts: bool) -> torch.cuda.Event:
        """The copies of one direction so far."""
        event = torch.cuda.Event()
        event.record(self._puts if puts else self.takes)
        return event

    def end(self) -> torch.cuda.Event:
        """All copies so far."""
        self.takes.wait_stream(self._puts)
        return self.mark(puts=False)

    def keep(self, tensor: Tensor) -> None:
        """The allocator gives the tensor's memory to no one before the copies so far are done."""
        tensor.record_stream(self._puts)
        tensor.record_stream(self.takes)

    def wait_until_at_least(self, word: int, count: int, *, puts: bool) -> None:
        """`word`: its address as the device sees it, here and below."""
        driver.wait_until_at_least(self._put if puts else self._take, word, count)

    def wait_until_equal(self, word: int, value: int, *, puts: bool) -> None:
        driver.wait_until_equal(self._put if puts else self._take, word, value)

    def write(self, word: int, value: int, *, puts: bool) -> None:
        """Once the copies of that direction so far are done."""
        driver.write(self._put if puts else self._take, word, value)

    def close(self) -> None:
        with torch.cuda.device(self.device):
            self.takes.synchronize()
            self._puts.synchronize()
            for address in self._registered:
                driver.unregister(address)
        self._registered.clear()
        _idle_streams[self.device].append((self._put, self._take))
