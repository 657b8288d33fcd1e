"""What a rank says when it fails: its own fault as it is, another's loss by that rank."""

import pytest
import torch.distributed as dist

import fs_comm
from examples.launch import explain, told_in_one_line
from fs_data.errors import RankLost
from fs_embed.errors import ExchangeTimeout, IdOutOfRange


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs_comm, "lost_ranks", lambda timeout_s: {1: "its process has ended"})


@pytest.mark.parametrize("error", [IdOutOfRange("ids of\nrank 0"), ValueError("no"), RuntimeError("unflatten: sizes")])
def test_a_fault_of_its_own_is_told_though_others_have_left(error: Exception) -> None:
    assert explain(error) == " ".join(str(error).split())


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("x"),
        RankLost((1,), "x"),
        ExchangeTimeout("x"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_failed_communication_is_told_by_the_rank_that_is_lost(error: Exception) -> None:
    assert explain(error).startswith("lost rank 1 (its process has ended); restart")


def test_the_line_ends_the_process_with_status_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit, match="1"), told_in_one_line():
        raise ValueError("no")
    assert capsys.readouterr().err == "train.py: rank 3: no\n"
