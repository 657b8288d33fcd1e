"""The doctor: what it says of a machine and of a job."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fs_comm import doctor
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def test_the_command_alone_measures_two_ranks_of_its_own() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": "1"}  # left over
    command = (sys.executable, "-m", "fs_comm.doctor", "--mib", "1", "--json")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [route[:2] for route in found["routes"]] == [[0, 1]]
    assert found["roads"]["as chosen"]["road"] == found["routes"][0][2]
    for road in ("staged", "gloo"):
        assert found["roads"][road]["latency_us"] > 0
        assert found["roads"][road]["all_to_all_gb_per_s"] > 0


@pytest.mark.parametrize("setting", ["FS_COMM_ATTACH=off", "FS_COMM_VERBS_GID_INDEX=third"])
def test_a_setting_that_cannot_be_is_told_in_a_line(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = setting.split("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        doctor.main([])
    assert f"error: {name} must be" in (told := capsys.readouterr().err)
    assert f"got {value!r}" in told


def _examine() -> dict[str, Any]:
    os.environ["FS_COMM_HOST"] = "first" if dist.get_rank() < 2 else "second"
    try:
        return doctor.examine_job(100_000)
    finally:
        del os.environ["FS_COMM_HOST"]


def test_a_job_on_two_hosts_is_told_every_route_and_what_does_not_serve_it(ranks: Ranks) -> None:
    for found in ranks(3).run(_examine):
        assert len(found["hosts"]) == 2
        transports = {(a, b): road for a, b, road, _ in found["routes"]}
        assert transports.keys() == {(0, 1), (0, 2), (1, 2)}
        assert transports[0, 1] in ("attach", "staged")
        assert transports[0, 2] == transports[1, 2] != transports[0, 1]
        assert "shm: they are on several hosts" in found["routes"][1][3]
        assert "several hosts" in found["roads"]["staged"]
        shown = doctor.text(found)
        assert "locked memory" in shown
        assert "0 and 2: " in shown
