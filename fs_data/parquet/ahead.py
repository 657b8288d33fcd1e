"""Reads ahead of the consumer in a thread, as far as a bound on bytes allows."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fs_data.parquet.errors import ParquetError

Item = TypeVar("Item")
Part = TypeVar("Part")


def read_ahead(
    items: Iterable[Item],
    read: Callable[[Item], Part],
    num_bytes: Callable[[Item], int],
    *,
    max_bytes: int,
    timeout_s: float,
) -> Iterator[Part]:
    """`read(item)` of all items in order; errors surface where the part is taken.

    Parts that were read, are being read, or are with the consumer hold at most `max_bytes`, or are a single one that
    is larger. With `max_bytes` 0, nothing runs ahead and there is no thread.

    Raises:
        ParquetError: A read did not end within `timeout_s`.
    """
    if max_bytes == 0:
        yield from map(read, items)
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="parquet-ahead")
    queue: deque[tuple[Future[Part], int]] = deque()
    held = 0  # by the queue and the consumer
    coming = iter(items)
    upcoming = next(coming, None)
    try:
        while True:
            while upcoming is not None and (held == 0 or held + num_bytes(upcoming) <= max_bytes):
                queue.append((pool.submit(read, upcoming), num_bytes(upcoming)))
                held += queue[-1][1]
                upcoming = next(coming, None)
            if not queue:
                return
            future, size = queue.popleft()
            try:
                part = future.result(timeout_s)
            except TimeoutError as error:
                if future.done():
                    raise
                raise ParquetError(f"a row group must be read within {timeout_s:g} s; raise timeout_s") from error
            del future
            yield part
            del part
            held -= size
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
