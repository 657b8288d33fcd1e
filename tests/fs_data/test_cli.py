"""`fs-data`: each command on a small file, for people and for programs; and the report as a browser draws it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fs_data.cli.app import app

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "histories.parquet"
    text = run("generate", path, "--users", 400, "--max-length", 600, "--items", 2_000, "--json")
    assert json.loads(text.splitlines()[-1]) == {
        "out": str(path), "users": 400, "items": 2_000, "bytes": path.stat().st_size,
    }  # fmt: skip
    return path


def test_balance_tells_what_each_plan_saves(data: Path) -> None:
    found = json.loads(run("balance", data, "--ranks", 8, "--batch", 8, "--json").splitlines()[-1])
    trials = {t["partitioner"]: t for t in found["trials"]}
    assert set(trials) == {"identity", "few_moves", "lpt", "fbs", "vbs"}
    assert trials["identity"]["straggler_share"] > 0.1 > 0.02 > trials["few_moves"]["straggler_share"]
    assert trials["few_moves"]["bytes_moved_share"] < 0.3 < trials["lpt"]["bytes_moved_share"]
    text = run("balance", data, "--ranks", 8, "--batch", 8, "--partitioner", "identity", "--partitioner", "fbs")
    assert "as dealt" in text
    assert "fbs" in text
    assert "lpt" not in text


def test_inspect_tells_lengths_sparsity_and_collisions(data: Path) -> None:
    found = json.loads(run("inspect", data, "--batch", 16, "--ranks", 1, "--ranks", 4, "--json").splitlines()[-1])
    assert found["lengths"]["rows"] == 400
    assert sum(count for _, count in found["lengths"]["histogram"]) == 400
    assert [(c["ranks"], c["batch_size"]) for c in found["collisions"]] == [(1, 16), (4, 16)]
    assert found["collisions"][0]["collision_share"] < found["collisions"][1]["collision_share"]
    assert "400 histories" in run("inspect", data)


def test_histories_without_items_have_nothing_to_save_or_share(tmp_path: Path) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"history": pa.array([[]] * 300, pa.list_(pa.int64()))}), path)
    settings = [path, "--ranks", 2, "--batch", 32, "--json"]
    found = json.loads(run("inspect", *settings).splitlines()[-1])
    assert found["lengths"]["items"] == 0
    assert [(c["collision_share"], c["distinct_share"]) for c in found["collisions"]] == [(0, 0)]
    trials = json.loads(run("balance", *settings).splitlines()[-1])["trials"]
    assert {(t["straggler_share"], t["saved_share"]) for t in trials} == {(0, 0)}
    run("report", *settings, "--out", tmp_path / "report.html")
    assert "nan" not in (tmp_path / "report.html").read_text()


def test_short_histories_have_a_class_for_each_length(tmp_path: Path) -> None:
    path = tmp_path / "short.parquet"
    pq.write_table(pa.table({"history": [[7, 8], [9], [], [1]]}), path)
    assert json.loads(run("inspect", path, "--json").splitlines()[-1])["lengths"]["histogram"] == [
        [0, 1],
        [1, 2],
        [2, 1],
    ]


def test_no_command_writes_over_what_it_reads(data: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item\n1,5\n")
    (tmp_path / "link.csv").symlink_to(log)
    assert "is the log" in run("build", log, tmp_path / "link.csv", status=1)
    assert "is the data" in run("report", data, "--ranks", 2, "--batch", 8, "--out", data, status=1)
    assert log.read_text() == "user,item\n1,5\n"
    run("balance", data, "--ranks", 2, "--batch", 8)


def test_an_interrupted_command_says_so_and_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'fs-data'; from fs_data.cli import main; main()"
    command = [sys.executable, "-c", script, "generate", tmp_path / "h.parquet", "--users", "10000000"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (tmp_path / "h.parquet").exists() or not (tmp_path / "h.parquet").stat().st_size:
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert not list(tmp_path.iterdir())


def test_build_makes_histories_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("user,item,at\n1,5,3\n1,6,1\n1,7,2\n2,9,1\n1,8,9\n")
    out = tmp_path / "h.parquet"
    found = json.loads(run("build", log, out, "--time", "at", "--json").splitlines()[-1])
    assert found["histories"]["rows"] == 2
    assert "2 histories" in run("build", log, out)


@pytest.mark.skipif("GAMES_DATA" not in os.environ, reason="needs the games data: set GAMES_DATA to its folder")
def test_build_makes_the_histories_of_the_games_data(tmp_path: Path) -> None:
    log = Path(os.environ["GAMES_DATA"]) / "interactions.txt"
    found = json.loads(run("build", log, tmp_path / "g.parquet", "--split", "none", "--json").splitlines()[-1])
    assert found["histories"]["rows"] == 31_013
    assert found["histories"]["items"] == 287_107
    lengths = found["histories"]["percentiles"]
    assert (lengths["0"], lengths["50"], lengths["100"]) == (1, 6, 860)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["balance", "none.parquet"], "nothing found at"),
        (["balance", "DATA", "--column", "nope"], "must have the columns ['nope'], it has ['user'"),
        (["balance", "DATA", "--ranks", "99"], "a global batch takes 99 ranks × 128 = 12672 rows, the data has 400"),
        (["balance", "DATA", "--ranks", "0"], "must be at least 1, got 0"),
        (["balance", "DATA", "--ranks", "2", "--batch", "8", "--partitioner", "few"], "partitioner must be one of"),
        (["balance", "DATA", "--cost", "cubic"], "cost must be linear"),
        (["inspect", "DATA", "--column", "user"], "'user' must hold lists of integer ids"),
        (["report", "DATA", "--ranks", "2", "--batch", "8", "--out", "no/such/folder.html"], "No such file"),
        (["build", "none.txt", "out.parquet"], "nothing at none.txt"),
        (["build", "DATA", "out.parquet", "--memory-limit", "lots", "--item", "test"], "building histories of"),
        (["inspect", "DATA", "--batch", "0"], "batch sizes must be at least 1, got [0]"),
        (["inspect", "DATA", "--ranks", "0"], "ranks must be at least 1, got [0]"),
        (["balance", "DATA", "--bytes-per-item", "-1"], "bytes_per_item must be at least 0, got -1"),
        (["generate", "out.parquet", "--exponent", "-1"], "exponent must be from 0 to 10"),
        (["generate", "out.parquet", "--collisions", "0.5", "--batch", "0"], "batch_rows must be at least 1, got 0"),
        (["generate", "out.parquet", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["generate", "out.parquet", "--seed", "-1", "--collisions", "0.5"], "seed must be at least 0, got -1"),
        (["balance", "DATA", "--bytes-per-item", "9" * 19], "all items must have less than 2^62 bytes"),
        (["balance", "DATA", "--cost", "quadratic:1"], "'quadratic:1' is no cost model"),
        (["balance", ""], "source must name a file, folder or glob, got an empty text"),
        (["build", ".", "out.parquet"], "the log must be a file, . is a folder"),
        (["generate", "out.parquet", "--items", "9" * 20], "num_items must be at most 2^53"),
        (["generate", "out.parquet", "--max-length", "9" * 20], "max_length must be less than 2^31"),
        (["generate", "out.parquet", "--rows-per-group", "200000"], "a row group must hold less than 2^31 items"),
        (["generate", "out.parquet", "--users", "0"], "num_users must be at least 1, got 0"),
        (["generate", "out.parquet", "--items", "5", "--collisions", "0.5"], "must not be given together"),
    ],
)
def test_errors_are_one_line(data: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [str(data) if a == "DATA" else a for a in arguments])
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.strip()]
    assert line.startswith("fs-data: ")
    assert message in line


def test_the_installed_command_runs(data: Path) -> None:
    command = shutil.which("fs-data", path=str(Path(sys.executable).parent))
    assert command, "fs-data must be installed beside the interpreter: make setup"
    done = subprocess.run([command, "inspect", data, "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1])["lengths"]["rows"] == 400
    poor = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = [command, "balance", data, "--ranks", "2", "--batch", "8", "--partitioner", "lpt"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60, env=poor)
    assert "2 ranks ? 8" in done.stdout
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            failed = subprocess.run([*arguments, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert failed.returncode == 1
        assert failed.stderr.strip().startswith("fs-data: the results must be written: [Errno 28]")
    failed = subprocess.run([command, "inspect", "none"], capture_output=True, text=True, check=False, timeout=60)
    assert failed.returncode == 1


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "blue"), [("light", (0x2A, 0x63, 0xC9)), ("dark", (0x7A, 0xA7, 0xFF))])
def test_a_browser_draws_the_report(data: Path, tmp_path: Path, scheme: str, blue: tuple[int, int, int]) -> None:
    from PIL import Image

    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    run("report", data, "--ranks", 4, "--batch", 16, "--out", page)
    html = page.read_text()
    assert "src=" not in html  # nothing to load
    assert html.count("<svg") == 5
    assert BROWSER is not None
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}/user",
        *dark, "--window-size=390,2600", f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    assert image.width == 390
    drawn = [y for y in range(image.height) for x in range(0, image.width, 2) if image.getpixel((x, y)) == blue]
    assert len(drawn) > 5_000  # bars
    assert max(drawn) > image.height / 2  # down to the last plot
