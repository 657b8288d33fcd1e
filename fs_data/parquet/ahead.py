"""Reads ahead of the consumer in a thread, as far as a bound on bytes allows."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fs_data.parquet.errors import StorageError

_GRACE_S = 5.0
"""A read that can be stopped ends by itself at its time-out, and says more about it."""

Item = TypeVar("Item")
Part = TypeVar("Part")


def read_ahead(
    items: Iterable[Item],
    read: Callable[[Item], Part],
    num_bytes: Callable[[Item], int],
    reading_bytes: Callable[[Item], int],
    *,
    max_bytes: int,
    timeout_s: float,
) -> Iterator[Part]:
    """`read(item)` of all items in order; errors surface where the part is taken.

    Parts that were read, are being read, or are with the consumer hold at most `max_bytes`; only where not even one
    would fit is it read nevertheless. With `max_bytes` 0, nothing runs ahead and there is no thread.

    Args:
        num_bytes: Of a part.
        reading_bytes: Most memory while it is read, itself included.

    Raises:
        StorageError: A read did not end within `timeout_s`, nor soon after.
    """
    if max_bytes == 0:
        yield from map(read, items)
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="parquet-ahead")
    queue: deque[tuple[Future[Part], Item]] = deque()
    lent: deque[int] = deque(maxlen=2)  # the consumer's batch may share memory with two parts

    def fits(item: Item) -> bool:
        waiting = [item, *(queued for _, queued in queue)]
        held = sum(map(num_bytes, waiting)) + sum(lent)
        return held + max(reading_bytes(one) - num_bytes(one) for one in waiting) <= max_bytes  # one is read at a time

    coming = iter(items)
    upcoming = next(coming, None)
    try:
        while True:
            while upcoming is not None and (not queue or fits(upcoming)):
                queue.append((pool.submit(read, upcoming), upcoming))
                upcoming = next(coming, None)
            if not queue:
                return
            future, item = queue.popleft()
            try:
                part = future.result(timeout_s + _GRACE_S)
            except TimeoutError as error:
                if future.done():
                    raise
                raise StorageError(f"a row group must be read within {timeout_s:g} s; raise timeout_s") from error
            del future
            lent.append(num_bytes(item))
            yield part
            del part
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
