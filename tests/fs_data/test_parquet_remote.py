"""Files on an S3-compatible server and on an HTTP server, both real and local; failures that pass are tried again."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.fs as pafs
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from fs_data.parquet import ParquetError, ParquetUIHDataset
from tests.fs_data.test_parquet import rows_of, write


class FileServer(ThreadingHTTPServer):
    """Serves `folder` with ranges; the next `failures` bodies, or `all_failures` answers, have status 503."""

    daemon_threads = True
    folder: Path
    failures = 0
    all_failures = 0
    silent: tuple[str, ...] = ()
    """Methods that are not answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.server.folder / self.path.strip("/")
        if not path.is_file():
            self.send_error(404)
            return
        while self.command in self.server.silent:
            time.sleep(0.01)
        if self.server.all_failures or (with_body and self.server.failures):
            self.server.all_failures = max(0, self.server.all_failures - 1)
            self.server.failures = max(0, self.server.failures - with_body)
            self.send_error(503)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        part = data[int(asked[1]) : int(asked[2] or len(data) - 1) + 1] if asked else data
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if asked:
            self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="fsspec reads http by aiohttp, which is missing")
    with FileServer(("127.0.0.1", 0), Handler) as running:
        running.folder = tmp_path
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Credentials and address of a server with a bucket `histories`."""
    moto = pytest.importorskip("moto.server", reason="moto's server is missing: pip install 'moto[server]'")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"access_key": "test", "secret_key": "test", "region": "us-east-1"}
    options["endpoint_override"] = f"http://{host}:{port}"
    pafs.S3FileSystem(**options, allow_bucket_creation=True).create_dir("histories")
    yield options
    running.stop()


def upload(options: dict[str, str], file: Path, key: str) -> None:
    with pafs.S3FileSystem(**options).open_output_stream(f"histories/{key}") as out:
        out.write(file.read_bytes())


@pytest.mark.parametrize("library", ["pyarrow", "fsspec"])
def test_a_folder_on_s3_is_read_by_either_library(tmp_path: Path, s3: dict[str, str], library: str) -> None:
    rows = []
    for day in (1, 2):
        rows += write(tmp_path / "h.parquet", [7, 3], first=10 * day)
        upload(s3, tmp_path / "h.parquet", f"{library}/day={day}/h.parquet")
    if library == "pyarrow":
        filesystem: Any = pafs.S3FileSystem(**s3)
    else:
        s3fs = pytest.importorskip("s3fs", reason="s3fs is missing")
        filesystem = s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=s3["endpoint_override"], skip_instance_cache=True
        )
    for source in (f"histories/{library}", f"s3://histories/{library}/day=*/*.parquet"):
        dataset = ParquetUIHDataset(source, batch_size=4, filesystem=filesystem)
        batches = list(dataset)
        assert [r for b in batches for r in rows_of(b)] == rows
        assert batches[-1]["day"].tolist() == [2] * 4
    with pytest.raises(FileNotFoundError, match="nothing found at histories/nowhere"):
        ParquetUIHDataset("histories/nowhere", batch_size=4, filesystem=filesystem)


def test_a_url_names_server_and_bucket(tmp_path: Path, s3: dict[str, str]) -> None:
    rows = write(tmp_path / "h.parquet", [5])
    upload(s3, tmp_path / "h.parquet", "by-url/h 1.parquet")
    address = s3["endpoint_override"].removeprefix("http://")
    for path in ("by-url", "by-url/h 1.parquet", "by-url/h%201.parquet", "by-url/h [0-9].parquet"):
        url = f"s3://test:test@histories/{path}?scheme=http&endpoint_override={address}&region=us-east-1"
        (batch,) = ParquetUIHDataset(url, batch_size=5)
        assert rows_of(batch) == rows


def test_workers_read_from_s3(tmp_path: Path, s3: dict[str, str]) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3, 5])
    upload(s3, tmp_path / "h.parquet", "workers/h.parquet")
    dataset = ParquetUIHDataset("histories/workers", batch_size=4, filesystem=pafs.S3FileSystem(**s3))
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert sorted(r for b in loader for r in rows_of(b)) == rows


def test_a_file_on_http_is_read_by_ranges(tmp_path: Path, server: FileServer) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3])
    batches = list(ParquetUIHDataset(f"{server.url}/h.parquet", batch_size=4))
    assert [r for b in batches for r in rows_of(b)] == rows
    with pytest.raises(FileNotFoundError, match="nothing found at http"):
        ParquetUIHDataset(f"{server.url}/nothing.parquet", batch_size=4)


def test_a_passing_failure_is_tried_again_and_counted(tmp_path: Path, server: FileServer) -> None:
    rows = write(tmp_path / "h.parquet", [7, 3])
    dataset = ParquetUIHDataset(f"{server.url}/h.parquet", batch_size=10, backoff_s=0.01)
    server.failures = 2
    (batch,) = dataset
    assert rows_of(batch) == rows
    assert dataset.stats().retries == 2


def test_a_lasting_failure_names_file_and_attempts_or_skips_the_group(tmp_path: Path, server: FileServer) -> None:
    write(tmp_path / "h.parquet", [7])
    url = f"{server.url}/h.parquet"
    dataset = ParquetUIHDataset(url, batch_size=10, retries=2, backoff_s=0.01)
    server.failures = 1000
    with pytest.raises(ParquetError, match=r"/h\.parquet, row group 0 must be readable, failed 3 times, at last by"):
        list(dataset)
    server.failures = 0
    dataset = ParquetUIHDataset(url, batch_size=10, retries=1, backoff_s=0.01, on_error="skip")
    server.failures = 1000
    assert list(dataset) == []
    assert (dataset.stats().groups_skipped, dataset.stats().rows_skipped) == (1, 7)


def test_footers_that_the_storage_does_not_give_are_no_files_to_skip(tmp_path: Path, server: FileServer) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", [7])
    source = [f"{server.url}/{name}.parquet" for name in ("a", "b")]
    server.failures = 1  # other readers would get this one, and deal its rows too
    with pytest.raises(ParquetError, match=r"/[ab]\.parquet must be readable, failed 1 times"):
        ParquetUIHDataset(source, batch_size=10, on_error="skip", retries=0)


def test_a_file_that_must_not_be_read_is_named(tmp_path: Path, s3: dict[str, str]) -> None:
    s3fs = pytest.importorskip("s3fs", reason="s3fs is missing")
    filesystem = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=s3["endpoint_override"])
    write(tmp_path / "h.parquet", [7])
    upload(s3, tmp_path / "h.parquet", "closed/h.parquet")
    dataset = ParquetUIHDataset("histories/closed", batch_size=4, filesystem=filesystem)
    forbidden = mock.patch.object(filesystem, "open", side_effect=PermissionError("Forbidden"))
    with (
        forbidden,
        pytest.raises(PermissionError, match=r"closed/h\.parquet, row group 0 must be open to your cred.*Forb"),
    ):
        list(dataset)


def test_a_server_that_fails_while_listing_is_asked_again(tmp_path: Path, server: FileServer) -> None:
    rows = write(tmp_path / "h.parquet", [7])
    server.all_failures = 2  # the first look at the file: a HEAD, and a GET in its place
    dataset = ParquetUIHDataset(f"{server.url}/h.parquet", batch_size=10, backoff_s=0.01)
    assert dataset.stats().retries == 1
    assert [r for b in dataset for r in rows_of(b)] == rows
    server.all_failures = 1000
    with pytest.raises(ParquetError, match=r"listing of http.*h.parquet must be readable, failed 3 times.*503"):
        ParquetUIHDataset(f"{server.url}/h.parquet", batch_size=10, retries=2, backoff_s=0.01)


def test_a_server_that_does_not_answer_is_an_error_and_does_not_keep_the_process(
    tmp_path: Path, server: FileServer
) -> None:
    write(tmp_path / "h.parquet", [7])
    script = f"""
from fs_data.parquet import ParquetUIHDataset
def attempt(action):
    try:
        action()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
def make(**options):
    return ParquetUIHDataset("{server.url}/h.parquet", batch_size=4, **options)
ahead, when_needed = make(timeout_s=0.3), make(timeout_s=0.3, prefetch_bytes=0)
patient = iter(make())
print("made", flush=True)
input()
attempt(lambda: list(ahead))
attempt(lambda: list(when_needed))
attempt(lambda: make(timeout_s=0.3))  # the footer
print("silent", flush=True)
input()
attempt(lambda: make(timeout_s=0.3))  # the listing
import signal, threading
threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
try:
    next(patient)
except KeyboardInterrupt:
    print("interrupted")
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "made\n"
        server.silent = ("GET",)
        print(file=child.stdin, flush=True)
        lines = [child.stdout.readline() for _ in range(4)]
        server.silent = ("GET", "HEAD")
        out, _ = child.communicate("\n", timeout=20)
    finally:
        server.silent = ()
        child.kill()
    lines += out.splitlines(keepends=True)
    late = "must be read within 0.3 s, retries included; raise timeout_s"
    url = f"{server.url}/h.parquet"
    places = [f"{url}, row group 0", f"{url}, row group 0", url, "silent", f"the listing of {url}", "interrupted"]
    for line, place in zip(lines, places, strict=True):
        assert line == f"{place}\n" or line.startswith(f"StorageError {place} {late}"), line
    assert child.returncode == 0
