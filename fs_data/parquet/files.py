"""The files behind a source, wherever it lies: local paths, URLs, fsspec and pyarrow filesystems."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from fs_data.parquet.bounded import Deadline, bounded

Source = str | Path | Sequence[str | Path]
Attempt = Callable[[str, bool, Callable[[Deadline], Any]], Any]
"""Runs an access, with retries: `(place, is_local, action)`."""

_SUFFIXES = (".parquet", ".parq", ".pq")
_NATIVE = ("s3", "gs", "gcs", "hdfs", "abfs", "abfss")  # pyarrow reads these itself


@dataclass(frozen=True, slots=True)
class File:
    filesystem: Any
    """`pyarrow.fs.FileSystem`."""
    path: str
    partitions: tuple[tuple[str, str], ...]
    """Of directories named `key=value`, from the outermost."""

    @property
    def is_local(self) -> bool:
        return is_local(self.filesystem)

    def open(self, deadline: Deadline) -> pq.ParquetFile:
        # Remote reads are few and large; on a local disk they would only hold memory.
        return pq.ParquetFile(self.path, filesystem=bounded(self.filesystem, deadline), pre_buffer=not self.is_local)


def is_local(filesystem: Any) -> bool:
    return isinstance(filesystem, pafs.LocalFileSystem)


def find_files(source: Source, filesystem: Any, attempt: Attempt) -> list[File]:
    """Files in the order of their paths: a file, a folder's parquet files at any depth, a glob, or a sequence of these.

    Args:
        filesystem: A pyarrow or fsspec filesystem; None goes by the URL, else the local disk.
        attempt: Runs an access to storage, given its place, with retries.

    Raises:
        FileNotFoundError: Nothing there; the text names the source.
        ValueError: An empty sequence, or an empty text.
    """
    if not isinstance(source, (str, Path)):
        files = [file for part in source for file in find_files(part, filesystem, attempt)]
        if not files:
            raise ValueError("source must name at least one file, folder or glob, got an empty sequence")
        return files
    where, path = _resolve(source, filesystem)
    paths = attempt(
        f"the listing of {source}", is_local(where), lambda deadline: sorted(_find(bounded(where, deadline), path))
    )
    if not paths:
        raise FileNotFoundError(
            f"histories must be a parquet file, a folder of them or a glob: nothing found at {source}"
        )
    return [File(where, p, _partitions(p)) for p in paths]


def _resolve(source: str | Path, filesystem: Any) -> tuple[Any, str]:
    path = str(source)
    if filesystem is not None:
        if isinstance(filesystem, pafs.FileSystem):
            return filesystem, os.path.abspath(path) if is_local(filesystem) else path.partition("://")[2] or path
        return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem)), str(filesystem._strip_protocol(path))
    if not path:
        raise ValueError("source must name a file, folder or glob, got an empty text; '.' is the current folder")
    scheme, separator, _ = path.partition("://")
    if not separator:
        return pafs.LocalFileSystem(), os.path.abspath(path)
    if scheme == "file":
        host, _, local = path.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise ValueError(f"a URL of a local file must have an absolute path, file:///…, got {path}")
        return pafs.LocalFileSystem(), os.path.abspath(f"/{unquote(local)}")
    if scheme in _NATIVE:
        place, mark, options = path.partition("?")
        return pafs.FileSystem.from_uri(quote(place, safe="/:@%!$&'()*+,;=~") + mark + options)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{path} must be opened by fsspec, which is missing: pip install fsspec aiohttp") from error
    remote, path = url_to_fs(path)
    return pafs.PyFileSystem(pafs.FSSpecHandler(remote)), path


def _find(filesystem: Any, path: str) -> list[str]:
    info = filesystem.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [path]
    if info.type == pafs.FileType.Directory:
        inside = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
        return [i.path for i in inside if i.type == pafs.FileType.File and _is_data(i.path[len(path) :])]
    wildcard = re.search(r"[*?\[]", path)
    if wildcard is None:
        return []
    base = path[: path.rfind("/", 0, wildcard.start())]
    below = filesystem.get_file_info(pafs.FileSelector(base, recursive=True, allow_not_found=True))
    pattern = re.compile(_glob_regex(path))
    matching = [i for i in below if pattern.fullmatch(i.path) and not _is_hidden(i.path[len(base) :])]
    found = {i.path for i in matching if i.type == pafs.FileType.File}
    return list(found.union(*(_find(filesystem, i.path) for i in matching if i.type == pafs.FileType.Directory)))


def _is_data(path: str) -> bool:
    return path.endswith(_SUFFIXES) and not _is_hidden(path)


def _is_hidden(path: str) -> bool:
    """Spark and others leave `_SUCCESS` and `.crc` files, and folders of unfinished ones, beside the data."""
    return any(part.startswith(("_", ".")) for part in path.split("/"))


def _glob_regex(pattern: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]!][^\]]*\])", pattern)
    return "".join(_token_regex(part) if i % 2 else re.escape(part) for i, part in enumerate(parts))


def _token_regex(token: str) -> str:
    if not token.startswith("["):
        return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}[token]
    characters = re.sub(r"[\\^\[&~|]", r"\\\g<0>", token[1:-1].removeprefix("!"))
    return f"(?!/)[{'^' if token.startswith('[!') else ''}{characters}]"


def _partitions(path: str) -> tuple[tuple[str, str], ...]:
    pairs = (part.partition("=") for part in path.split("/")[:-1])
    return tuple((key, unquote(value)) for key, equals, value in pairs if equals and key.isidentifier())
