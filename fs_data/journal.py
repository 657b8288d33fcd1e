"""Plan journal: one short line a step, enough to replay a run whose plans depended on timing, and to rebuild any batch.

A plan follows from the samples that ranks drew, which a deterministic dataset gives again, and from what the cost model
and the partitioner took from measured times, which nothing gives again: their decisions. The journal keeps these and a
fingerprint of the plan. It is text, a JSON object a line, first the settings of the run; a line cut short by a crash is
left out, and a step written again after a restart counts from its last time on.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fs_data.errors import Disagreement, LoaderError
from fs_data.shuffle_plan import Plan

_VERSION = 1
_ROLES = ("partition", "cost")
"""Who decides. Each may have `decision() -> list[int] | None`, asked after a plan, and `replay(decision)`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One step."""

    step: int
    batch: int | None
    """Which batch of its pass every rank's loader gave; None where the run did not say."""
    fingerprint: int
    decisions: dict[str, list[int] | None] = field(default_factory=dict[str, "list[int] | None"])
    """Of the partition function and the cost model, where they learn from times."""


class Journal:
    """Writes; one rank's is enough, since all plan alike. A run that resumes goes on in the same file.

    Args:
        path: A file; its folder must exist.
        world_size: Of the run.
        settings: What plans depend on, such as the names of the partitioner and the cost model.
    """

    def __init__(self, path: str | PathLike[str], *, world_size: int, settings: str) -> None:
        self.path = Path(path)
        head = {"version": _VERSION, "world_size": world_size, "settings": settings}
        if self.path.exists() and self.path.stat().st_size:
            _check_head(self.path, _lines(self.path)[0], head)
            _cut_unfinished_line(self.path)
            self._file = self.path.open("a", buffering=1)
        else:
            self._file = self.path.open("w", buffering=1)  # a line reaches the system at once, and survives a crash
            self._file.write(_dump(head))
        self._last: dict[str, list[int] | None] = {}

    def record(self, step: int, plan: Plan, partition: object, cost: object, *, batch: int | None = None) -> None:
        """Called once for each plan, after it was made and in the order of steps."""
        entry: dict[str, Any] = {"step": step, "plan": f"{plan.fingerprint:016x}"}
        if batch is not None:
            entry["batch"] = batch
        for role, owner in zip(_ROLES, (partition, cost), strict=True):
            decision = owner.decision() if hasattr(owner, "decision") else None  # pyright: ignore
            # Cost coefficients stand for many steps, and are written when they change. Corrections count each time.
            if decision is not None and (role == "partition" or decision != self._last.get(role)):
                entry[role] = _pack(decision)
            self._last[role] = decision
        if self._file.closed:  # a pass after close()
            self._file = self.path.open("a", buffering=1)
        self._file.write(_dump(entry))

    def close(self) -> None:
        """May be called twice."""
        self._file.close()


class Replay:
    """Reads a journal, and makes a partition function and a cost model decide as they did in the run that wrote it."""

    def __init__(
        self, path: str | PathLike[str], *, world_size: int | None = None, settings: str | None = None
    ) -> None:
        self.path = Path(path)
        lines = _lines(self.path)
        want = {"version": _VERSION, "world_size": world_size, "settings": settings}
        _check_head(self.path, lines[0], {k: v for k, v in want.items() if v is not None})
        self.world_size: int = lines[0]["world_size"]
        self.settings: str = lines[0]["settings"]
        self.entries = _entries(lines[1:])
        self._position = 0  # entries whose decisions have been handed out

    def before(self, step: int, partition: object, cost: object) -> Entry:
        """Hands out the decisions of all steps up to `step`; called before it is planned, at first on fresh objects.

        Steps may be left out on the way, but not gone back to.
        """
        entry = self._entry(step)
        while self._position < len(self.entries) and self.entries[self._position].step <= step:
            for role, owner in zip(_ROLES, (partition, cost), strict=True):
                if hasattr(owner, "replay"):
                    owner.replay(self.entries[self._position].decisions.get(role))  # pyright: ignore
            self._position += 1
        return entry

    def check(self, step: int, plan: Plan) -> None:
        """Raises Disagreement unless `plan` is the one that the run had at `step`."""
        want = self._entry(step).fingerprint
        if plan.fingerprint != want:
            raise Disagreement(
                f"batch {step} must have plan {want:016x} as in {self.path}, got {plan.fingerprint:016x}: the ranks' "
                f"batches are not those of that run, or its settings were others ({self.settings!r})"
            )

    def _entry(self, step: int) -> Entry:
        at = int(np.searchsorted([e.step for e in self.entries], step))
        if at == len(self.entries) or self.entries[at].step != step:
            have = f"{self.entries[0].step} to {self.entries[-1].step}" if self.entries else "none"
            raise LoaderError(f"{self.path} must hold batch {step} to replay it, but its batches are {have}")
        return self.entries[at]


def _entries(lines: list[dict[str, Any]]) -> list[Entry]:
    entries: list[Entry] = []
    for line in lines:
        step = line["step"]
        while entries and entries[-1].step >= step:  # the run was restarted from a checkpoint before that step
            entries.pop()
        cost = _unpack(line["cost"]) if "cost" in line else (entries[-1].decisions["cost"] if entries else None)
        partition = _unpack(line["partition"]) if "partition" in line else None
        entries.append(
            Entry(
                step=step, batch=line.get("batch"), fingerprint=int(line["plan"], 16),
                decisions={"partition": partition, "cost": cost},
            )
        )  # fmt: skip
    return entries


def _check_head(path: Path, head: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    for name, value in want.items():
        if head.get(name) != value:
            raise LoaderError(
                f"{path} must be a journal with {name} {value!r}, it has {head.get(name)!r}; use another file"
            )


def _lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; the last may have been cut short."""
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as e:
            if line.endswith("\n"):
                raise LoaderError(f"{path} must be a plan journal, but line {number} is not JSON: {e}") from e
    if not lines or not isinstance(lines[0], dict) or "version" not in lines[0]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LoaderError(f"{path} must be a plan journal, but its first line names no version")
    return lines


def _cut_unfinished_line(path: Path) -> None:
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _dump(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _pack(decision: list[int]) -> list[int] | str:
    """A correction of every rank is many small numbers: bytes, compressed. The rest stays legible."""
    if len(decision) <= 16 or not all(-128 <= x < 128 for x in decision):
        return decision
    return base64.b85encode(zlib.compress(np.asarray(decision, np.int8).tobytes(), 9)).decode()


def _unpack(value: list[int] | str) -> list[int]:
    return (
        np.frombuffer(zlib.decompress(base64.b85decode(value)), np.int8).tolist() if isinstance(value, str) else value
    )
