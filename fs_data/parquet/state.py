"""A dataset's position as plain values: found in loaders' states, checked, and joined for other numbers of readers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fs_data.parquet.deal import Round
from fs_data.parquet.errors import ParquetError

VERSION = 3
KIND = "ParquetUIHDataset"


def check_same(saved: Mapping[str, Any], mine: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raises `ParquetError` naming what differs between two states; `keys` gives each key's meaning."""
    if saved.get("kind") != KIND:
        raise ParquetError(f"the state must be that of a {KIND}, got one with the keys {sorted(saved)}")
    for key, what in keys.items():
        if saved[key] != mine[key]:
            raise ParquetError(
                f"a dataset's state must be loaded for the same {what}: saved {saved[key]}, here {mine[key]}; "
                "restore what it was saved with, carry it over by reshard(states) where only readers or batch_size "
                "differ, or start the epoch anew"
            )


def check_files(saved: Sequence[Sequence[Any]], paths: Sequence[Sequence[str]], sums: Sequence[Sequence[str]]) -> None:
    """Raises `ParquetError` naming the first file whose footer is not the one that the state was saved with."""
    counts = [len(s) for s in saved], [len(s) for s in sums]
    if counts[0] != counts[1]:
        raise ParquetError(f"a dataset's state must be loaded for the same files: saved {counts[0]}, here {counts[1]}")
    for source, (old, new) in enumerate(zip(saved, sums, strict=True)):
        for i, (before, now) in enumerate(zip(old, new, strict=True)):
            if before != now:
                raise ParquetError(
                    f"a dataset's state must be loaded for the same files: {paths[source][i]} has changed since "
                    f"(footer {before} then, {now} now); start the epoch anew"
                )


def find_states(holder: Any) -> Iterator[Mapping[str, Any]]:
    """All datasets' states inside a loader's state, or inside a sequence of such.

    Raises:
        ParquetError: A loader's state that stands some steps after its snapshot of the dataset.
    """
    if isinstance(holder, Mapping):
        if holder.get("kind") == KIND:
            yield holder
            return
        if holder.get("_steps_since_snapshot"):
            raise ParquetError(
                "a loader's state must be as recent as the dataset's inside it, it is "
                f"{holder['_steps_since_snapshot']} steps later; save with snapshot_every_n_steps=1"
            )
        for value in holder.values():
            yield from find_states(value)
    elif isinstance(holder, Sequence) and not isinstance(holder, (str, bytes)):
        for value in holder:
            yield from find_states(value)


def join(states: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], list[Round]]:
    """One of the states, and for each source the round that all of them together made.

    Raises:
        ParquetError: States of different moments, or not one of each reader.
    """
    if not states:
        raise ParquetError(f"states must hold the state of a {KIND} for each reader, got none")
    first = states[0]
    for state in states:
        for key in ("version", "epoch", "rounds", "order", "batch_size", "files"):
            if state[key] != first[key]:
                raise ParquetError(f"all readers' states must agree in {key}, got {first[key]} and {state[key]}")
    _, world_size, _, num_workers = first["reader"]
    by_reader: dict[int, Mapping[str, Any]] = {}
    for state in states:
        rank, ranks, worker, workers = state["reader"]
        if (ranks, workers) != (world_size, num_workers):
            raise ParquetError(
                f"all readers' states must be of as many ranks and workers, got {world_size} × {num_workers} and "
                f"{ranks} × {workers}"
            )
        reader = worker * world_size + rank
        if by_reader.setdefault(reader, state)["positions"] != state["positions"]:
            raise ParquetError(f"a reader must have one state, got two positions of rank {rank}, worker {worker}")
    missing = sorted(set(range(world_size * num_workers)) - by_reader.keys())
    if missing:
        names = [f"rank {r % world_size} worker {r // world_size}" for r in missing]
        raise ParquetError(f"states must hold one state for each reader, missing: {', '.join(names)}")
    ordered = [by_reader[r] for r in range(world_size * num_workers)]
    rounds = [
        Round(len(ordered), first["batch_size"], tuple(state["positions"][source] for state in ordered))
        for source in range(len(first["files"]))
    ]
    return first, rounds
