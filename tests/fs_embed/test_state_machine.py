"""No sequence of legal calls gives other losses or another table than training does that never looks ahead.

Two such trainings: the synchronous mode, bit for bit, and one process with a plain table and a plain optimizer, within
what another order of sums makes.
"""

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from torch import Tensor, nn

import fs_embed
from tests.ranks import RankPool

ROWS, DIM = 9, 3
# With the usual eps, where gradients all but cancel, Adam's step would depend on the order of sums.
OPTIMIZERS: dict[str, Any] = {"sgd": fs_embed.SGD(lr=0.05), "adam": fs_embed.Adam(lr=0.05, eps=1e-3)}
BACKWARDS = ["backward", "backward", "backward", "not finite on one rank", "no backward"]

ids = st.lists(st.integers(0, ROWS - 1), max_size=6)
free = st.tuples(
    st.just("step"),
    ids,
    st.sampled_from(["announced", "changed", "late", "not announced"]),
    st.sampled_from(BACKWARDS),
)
# Leaving a batch out takes a loop that announces all of them: nothing else tells a rank that it missed one. Nor may one
# rank leave out what another looks up unannounced, and go on to evaluate: both would wait for the whole timeout.
strict = st.one_of(
    st.tuples(
        st.just("step"), ids, st.just("announced"), st.sampled_from([*BACKWARDS, "not called", "one rank not called"])
    ),
    st.tuples(st.just("step"), ids, st.just("changed"), st.sampled_from([*BACKWARDS, "not called"])),
)
other = st.tuples(st.sampled_from(["eval", "flush", "flush on rank 0", "save", "load", "rate"]))
programs = st.one_of(*(st.lists(st.one_of(s, s, other), min_size=1, max_size=14) for s in (free, strict)))


def ids_of(op: Any, rank: int) -> Tensor:
    return torch.tensor([(i * (1 + rank)) % ROWS for i in op[1]], dtype=torch.int64)


def loss_of(rows: Tensor, what: str, rank: int) -> Tensor:
    loss = (rows.tanh() * torch.linspace(-1, 2, DIM)).sum() + (rows**2).sum()
    return loss * (float("inf") if what == "not finite on one rank" and rank == 1 else 1.0)


def is_called(what: str, rank: int) -> bool:
    return not (what == "not called" or (what == "one rank not called" and rank == 1))


def has_backward(what: str, rank: int) -> bool:
    return what != "no backward" and not (what == "backward on one rank" and rank == 1)


def initial_table() -> Tensor:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, DIM).weight.detach()


class Rank:
    def __init__(self, mode: str, optimizer: str) -> None:
        self.model = nn.Module()
        self.model.table = nn.Embedding.from_pretrained(initial_table(), freeze=False)
        fs_embed.prioritize(
            self.model,
            optimizer=OPTIMIZERS[optimizer],
            mode=mode,
            timeout_s=15.0,
            check_versions=True,  # type: ignore
        )
        self.faces = fs_embed.TableOptimizers(self.model)
        self.saved: tuple[Any, Any] | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def run(self, program: list[Any]) -> tuple[list[float], Tensor]:
        table, seen = self.model.table, list[float]()
        steps = [op for op in program if op[0] == "step"]
        ids = [ids_of(op, self.rank) for op in steps]
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

        number, uneven = 0, False
        announce(1)
        for op in program:
            if op[0] != "step":
                # A flush would wait for the rank that left the step out, which waits for this one to evaluate.
                if not (uneven and op[0].startswith("flush")):
                    seen += self.other(op[0])
                uneven = uneven and op[0] not in ("eval", "save", "load")
                continue
            uneven = op[3] in ("one rank not called", "backward on one rank")
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
        if not is_called(what, self.rank):
            return []
        if announced == "late":
            self.model.table.prefetch([ids])
        loss = loss_of(self.model.table(ids), what, self.rank)
        if has_backward(what, self.rank):
            loss.backward()
        return [float(loss.detach())]

    def other(self, what: str) -> list[float]:
        table, seen = self.model.table, list[float]()
        if what in ("eval", "save"):  # a state that is taken alone lacks steps that this rank is yet to find out about
            self.model.eval()
            with torch.no_grad():
                seen.append(float(table(torch.arange(ROWS)).sum()))
            self.model.train()
        if what == "flush" or (what == "flush on rank 0" and self.rank == 0):
            table.flush()
        if what == "save":
            self.saved = copy.deepcopy((dict(self.model.state_dict()), self.faces.state_dict()))
        if what == "load" and self.saved is not None:
            self.model.load_state_dict(self.saved[0])
            self.faces.load_state_dict(self.saved[1])
        if what == "rate":
            self.faces.param_groups[0]["lr"] *= 0.5
        return seen


class Plain:
    """The same program in one process that holds the whole table and all ranks' batches."""

    def __init__(self, optimizer: str, world_size: int) -> None:
        self.optimizer, self.world_size = OPTIMIZERS[optimizer], world_size
        self.now: dict[str, Any] = {
            "table": initial_table(), "m": torch.zeros(ROWS, DIM), "v": torch.zeros(ROWS, DIM), "steps": 0,
            "lr": self.optimizer.lr,
        }  # fmt: skip
        self.saved: dict[str, Any] | None = None

    def run(self, program: list[Any], rank: int) -> tuple[list[float], Tensor]:
        """What `rank` sees, and the table at the end."""
        seen: list[float] = []
        for op in program:
            if op[0] == "step":
                losses = self.step(op)
                seen += [losses[rank]] if rank in losses else []
            elif op[0] in ("eval", "save"):
                seen.append(float(self.now["table"].sum()))
            if op[0] == "save":
                self.saved = copy.deepcopy(self.now)
            elif op[0] == "load" and self.saved is not None:
                self.now = copy.deepcopy(self.saved)
            elif op[0] == "rate":
                self.now["lr"] *= 0.5
        return seen, self.now["table"]

    def step(self, op: Any) -> dict[int, float]:
        what, losses = op[3], dict[int, float]()
        table = self.now["table"].clone().requires_grad_()
        total, touched = torch.zeros(()), torch.zeros(ROWS, dtype=torch.bool)
        for rank in range(self.world_size):
            if is_called(what, rank):
                loss = loss_of(nn.functional.embedding(ids_of(op, rank), table), what, rank)
                losses[rank] = float(loss.detach())
                if has_backward(what, rank):
                    total = total + loss / self.world_size
                    touched[ids_of(op, rank)] = True
        if total.requires_grad:
            (grad,) = torch.autograd.grad(total, table)
            if grad.isfinite().all():
                self.update(grad, touched)
        return losses

    def update(self, grad: Tensor, touched: Tensor) -> None:
        """Rows that were looked up, and no others."""
        now, g = self.now, grad[touched]
        now["steps"] += 1
        if isinstance(self.optimizer, fs_embed.SGD):
            now["table"][touched] -= now["lr"] * g
            return
        o, n = self.optimizer, now["steps"]
        now["m"][touched] = o.beta1 * now["m"][touched] + (1 - o.beta1) * g
        now["v"][touched] = o.beta2 * now["v"][touched] + (1 - o.beta2) * g * g
        m, v = now["m"][touched] / (1 - o.beta1**n), now["v"][touched] / (1 - o.beta2**n)
        now["table"][touched] -= now["lr"] * m / (v.sqrt() + o.eps)


def _same(program: list[Any], optimizer: str) -> str:
    expected = Rank("synchronous", optimizer).run(program)
    found = Rank("prioritized", optimizer).run(program)
    if str(expected[0]) != str(found[0]):  # as text, in which not a number equals itself
        return f"losses {expected[0]} and {found[0]}"
    if not torch.equal(expected[1], found[1]):
        return f"tables {expected[1]} and {found[1]}"
    seen, table = Plain(optimizer, dist.get_world_size()).run(program, dist.get_rank())
    same = torch.allclose(torch.tensor(seen), torch.tensor(found[0]), rtol=1e-3, atol=1e-4, equal_nan=True)
    if same and torch.allclose(table, found[1], rtol=1e-3, atol=1e-4):
        return ""
    return f"a plain table: losses {seen} and {found[0]}, tables {table} and {found[1]}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs)
@example(program=[("step", [], "announced", "one rank not called"), ("eval",)])
@example(program=[("step", [5], "announced", "one rank not called"), ("rate",)])
@example(program=[("step", [1], "announced", "backward on one rank"), ("eval",)])
@example(program=[("step", [0], "not announced", "no backward"), ("step", [], "not announced", "backward")])
@example(
    program=[
        ("step", [1], "announced", "one rank not called"),
        ("load",),
        ("save",),
        ("step", [1], "announced", "backward"),
    ]
)
def test_no_sequence_of_calls_gives_another_table(
    ranks: Callable[[int], RankPool], optimizer: str, program: list[Any]
) -> None:
    for difference in ranks(2).run(_same, program, optimizer, timeout_s=60):
        assert not difference
