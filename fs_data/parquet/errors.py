"""What can be wrong with a file, said with the place, and a second try for what may pass by itself."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from fs_data.parquet.bounded import Deadline

T = TypeVar("T")
_log = logging.getLogger(__name__)


class ParquetError(ValueError):
    """A file that cannot be read as histories, or that changed under a saved state."""


class StorageError(ParquetError):
    """Storage that failed, or did not answer, for longer than it was waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """With storage that fails or does not answer."""

    retries: int
    backoff_s: float
    timeout_s: float
    """For one access, with all its retries."""


def with_retries(
    action: Callable[[], T],
    place: str,
    patience: Patience,
    *,
    is_local: bool,
    deadline: Deadline,
    on_retry: Callable[[], None],
) -> T:
    """The result of `action`, tried again after `backoff_s`, twice that, and so on where a failure may be passing.

    What the bytes themselves cause is final: a broken file stays broken.

    Args:
        deadline: Started here; `action` reads by filesystems that are `bounded` by it.

    Raises:
        FileNotFoundError: As it comes, on a local disk only.
        PermissionError: With the place, which remote filesystems leave out.
        StorageError: A failure that outlived all retries; with the place.
        ParquetError: Broken bytes; with the place.
    """
    deadline.start(patience.timeout_s)
    for attempt in range(patience.retries + 1):
        try:
            return action()
        except ParquetError:
            raise
        except PermissionError as error:
            raise PermissionError(f"{place} must be open to your credentials: {error}") from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ParquetError(f"{place} must be a complete parquet file: {error}; was it cut short?") from error
        except Exception as error:  # each filesystem library has errors of its own
            # Remote filesystems take a server's failure for a missing file, too.
            if is_local and isinstance(error, FileNotFoundError):
                raise
            # A corrupt page is an OSError as well; on a local disk it is one without a number.
            if is_local and isinstance(error, OSError) and error.errno is None:
                raise ParquetError(f"{place} must hold intact pages: {error}; write the file anew") from error
            wait_s = patience.backoff_s * 2**attempt
            if deadline.left_s <= (wait_s if attempt < patience.retries else 0):
                raise StorageError(
                    f"{place} must be read within {patience.timeout_s:g} s, retries included; raise timeout_s "
                    f"({error!r})"
                ) from error
            if attempt == patience.retries:
                raise StorageError(
                    f"{place} must be readable, failed {attempt + 1} times, at last by {error!r}"
                ) from error
            _log.warning(
                "%s: %r; trying again in %.1f s (%d of %d)", place, error, wait_s, attempt + 1, patience.retries
            )
            on_retry()
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
