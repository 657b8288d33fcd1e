"""No sequence of legal calls gives other losses or another table than synchronous training does."""

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import fs_embed
from tests.ranks import RankPool

ROWS, DIM = 9, 3
OPTIMIZERS: dict[str, Any] = {"sgd": fs_embed.SGD(lr=0.25), "adam": fs_embed.Adam(lr=0.05)}

ids = st.lists(st.integers(0, ROWS - 1), max_size=6)
free = st.tuples(
    st.just("step"),
    ids,
    st.sampled_from(["announced", "changed", "late", "not announced"]),
    st.sampled_from(["backward", "backward", "no backward"]),
)
# Leaving a batch out takes a loop that announces all of them: nothing else tells a rank that it missed one.
strict = st.tuples(
    st.just("step"),
    ids,
    st.sampled_from(["announced", "announced", "changed"]),
    st.sampled_from(["backward", "backward", "no backward", "not called", "one rank not called"]),
)
other = st.tuples(st.sampled_from(["eval", "flush", "flush on rank 0", "save", "load", "rate"]))
programs = st.one_of(*(st.lists(st.one_of(s, s, other), min_size=1, max_size=14) for s in (free, strict)))


class Rank:
    def __init__(self, mode: str, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.table = nn.Embedding(ROWS, DIM)
        fs_embed.prioritize(self.model, optimizer=OPTIMIZERS[optimizer], mode=mode, timeout_s=15.0)  # type: ignore
        self.faces = fs_embed.TableOptimizers(self.model)
        self.saved: tuple[Any, Any] | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def run(self, program: list[Any]) -> tuple[list[float], Tensor]:
        table, seen = self.model.table, list[float]()
        steps = [op for op in program if op[0] == "step"]
        ids = [torch.tensor([(i * (1 + self.rank)) % ROWS for i in op[1]], dtype=torch.int64) for op in steps]
        announced = 0

        def announce(upto: int) -> None:
            nonlocal announced
            while announced < min(upto, len(steps)):
                kind = steps[announced][2]
                if kind in ("announced", "changed"):
                    other = (ids[announced] + 1) % ROWS if kind == "changed" else ids[announced]
                    table.prefetch([other])
                announced += 1
            if upto > len(steps):
                table.prefetch(None)

        number = 0
        announce(1)
        for op in program:
            if op[0] != "step":
                seen += self.other(op[0])
                continue
            announce(number + 2)
            seen += self.step(ids[number], op)
            number += 1
        table.prefetch(None)
        whole = self.model.state_dict()["table.weight"]
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole.clone()
        table.close()
        return seen, whole

    def step(self, ids: Tensor, op: Any) -> list[float]:
        _, _, announced, what = op
        left_out = what == "not called" or (what == "one rank not called" and self.rank == 1)
        if left_out:
            return []
        if announced == "late":
            self.model.table.prefetch([ids])
        rows = self.model.table(ids)
        loss = (rows.tanh() * torch.linspace(-1, 2, DIM)).sum() + (rows**2).sum()
        if what != "no backward":
            loss.backward()
        return [float(loss.detach())]

    def other(self, what: str) -> list[float]:
        table = self.model.table
        if what == "eval":
            self.model.eval()
            with torch.no_grad():
                found = float(table(torch.arange(ROWS)).sum())
            self.model.train()
            return [found]
        if what == "flush" or (what == "flush on rank 0" and self.rank == 0):
            table.flush()
        if what == "save":
            self.saved = copy.deepcopy((dict(self.model.state_dict()), self.faces.state_dict()))
        if what == "load" and self.saved is not None:
            self.model.load_state_dict(self.saved[0])
            self.faces.load_state_dict(self.saved[1])
        if what == "rate":
            self.faces.param_groups[0]["lr"] *= 0.5
        return []


def _same(program: list[Any], optimizer: str) -> str:
    expected = Rank("synchronous", optimizer).run(program)
    found = Rank("prioritized", optimizer).run(program)
    if expected[0] != found[0]:
        return f"losses {expected[0]} and {found[0]}"
    return "" if torch.equal(expected[1], found[1]) else f"tables {expected[1]} and {found[1]}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs)
def test_no_sequence_of_calls_gives_other_bits(
    ranks: Callable[[int], RankPool], optimizer: str, program: list[Any]
) -> None:
    for difference in ranks(2).run(_same, program, optimizer, timeout_s=60):
        assert not difference
