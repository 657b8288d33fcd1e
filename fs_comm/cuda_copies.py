"""Copies between one device and registered host memory, by its copy engines, in two streams of our own."""

import torch
from torch import Tensor

from fs_comm import driver


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
            self._put, self._take = driver.new_stream(), driver.new_stream()
        self._puts = torch.cuda.ExternalStream(self._put, device)
        self.takes = torch.cuda.ExternalStream(self._take, device)
        self.stream_waits = bool(stream_waits)
        self._registered: dict[int, tuple[int, int]] = {}
        self._try_waits = stream_waits is None

    def use_in_thread(self) -> None:
        torch.cuda.set_device(self.device)
        driver.set_context(self._context)

    def register(self, address: int, num_bytes: int, word: int) -> None:
        """Pins memory at `address`; the word at offset `word` in it may be used to try whether streams can wait."""
        with torch.cuda.device(self.device):
            self._registered[address] = (num_bytes, driver.register(address, num_bytes))
            if self._try_waits:
                self._try_waits = False
                self.stream_waits = self._can_wait(address + word)

    def _can_wait(self, address: int) -> bool:
        try:
            driver.write(self._put, self._seen_by_device(address), 0)
            driver.wait_until_at_least(self._put, self._seen_by_device(address), 0)
            self._puts.synchronize()
        except driver.DriverError:
            return False
        return True

    def _seen_by_device(self, address: int) -> int:
        for start, (num_bytes, device) in self._registered.items():
            if start <= address < start + num_bytes:
                return device + address - start
        raise ValueError(f"address {address:#x} is not in registered memory")

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

    def wait_until_at_least(self, address: int, count: int, *, puts: bool) -> None:
        driver.wait_until_at_least(self._put if puts else self._take, self._seen_by_device(address), count)

    def wait_until_equal(self, address: int, value: int, *, puts: bool) -> None:
        driver.wait_until_equal(self._put if puts else self._take, self._seen_by_device(address), value)

    def write(self, address: int, value: int, *, puts: bool) -> None:
        """Once the copies of that direction so far are done."""
        driver.write(self._put if puts else self._take, self._seen_by_device(address), value)

    def close(self) -> None:
        with torch.cuda.device(self.device):
            self.takes.synchronize()
            self._puts.synchronize()
            for address in self._registered:
                driver.unregister(address)
            driver.destroy_stream(self._put)
            driver.destroy_stream(self._take)
        self._registered.clear()
