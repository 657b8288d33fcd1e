"""From an interaction log to histories: one row a user, items in order of time, the last two held out if asked.

DuckDB does the grouping, and spills to disk what does not fit in memory.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import pyarrow.parquet as pq

if TYPE_CHECKING:
    import duckdb

Split = Literal["leave-one-out", "none"]


def build_histories(
    log: str | Path,
    out: str | Path,
    *,
    user: str = "user",
    item: str = "item",
    time: str | None = None,
    split: Split = "leave-one-out",
    rows_per_group: int = 2048,
    memory_limit: str = "2GB",
) -> int:
    """Writes the histories of all users of `log` to the parquet file `out`, by user; returns their number.

    Args:
        log: Parquet, or CSV with a header, or text without one, whose lines are `user item` or `user item time`.
        user, item: Integer columns.
        time: Orders a user's items, equal times as they stand in the log; None keeps the log's order.
        split: `"leave-one-out"` moves the last item to `test` and the one before to `validation`, 0 for both where a
            user has fewer than three; `"none"` keeps all in `history`.
        rows_per_group: Users a row group, rounded up to a multiple of 2048 by DuckDB.

    Raises:
        FileNotFoundError: No log.
        ValueError: A column that is not there or not of integers, an empty log, an interaction that lacks a value,
            an item below 1, which is kept for "none", or the log itself as `out`.
        RuntimeError: What DuckDB cannot read or do, in its words.
        ModuleNotFoundError: DuckDB is not installed.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    if not Path(log).exists():
        raise FileNotFoundError(f"the log must be a file: nothing at {log}")
    if Path(log).is_dir():
        raise ValueError(f"the log must be a file, {log} is a folder")
    if Path(out).exists() and Path(out).samefile(log):
        raise ValueError(f"the histories must go to a file of their own, {out} is the log")
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("building histories needs DuckDB: pip install 'freescale[cli]'") from error
    with duckdb.connect() as db, _duckdb_errors(duckdb.Error, log):
        db.execute("SET memory_limit = ?", [memory_limit])
        db.execute("SET temp_directory = ?", [str(Path(out).absolute().parent / ".build-spill")])
        source = _source(db, log, user, item, time)
        counted = db.execute(f"SELECT count(*), count(*) - count(known), min(item) FROM ({source})").fetchone()
        assert counted is not None
        interactions, incomplete, least = counted
        if not interactions:
            raise ValueError(f"the log must have interactions, {log} has none")
        if incomplete:
            what = "user and item" if time is None else "user, item and time"
            raise ValueError(
                f"each interaction must have {what}, {incomplete} of {interactions} in {log} lack one: leave them out"
            )
        if least < 1:
            raise ValueError(f"items must be 1 or more, {log} has {least}: number them anew")
        held_out = "len(items) > 2" if split == "leave-one-out" else "false"
        db.execute(
            f"""
            COPY (
                SELECT
                    "user",
                    CASE WHEN {held_out} THEN items[:-3] ELSE items END AS history
                    {"" if split == "none" else f", CASE WHEN {held_out} THEN items[-2] ELSE 0 END AS validation"}
                    {"" if split == "none" else f", CASE WHEN {held_out} THEN items[-1] ELSE 0 END AS test"}
                FROM (SELECT "user", list(item ORDER BY place) AS items FROM ({source}) GROUP BY "user")
                ORDER BY "user"
            ) TO '{_quoted(out)}' (FORMAT parquet, ROW_GROUP_SIZE {rows_per_group})
            """
        )
    return pq.read_metadata(out).num_rows


@contextmanager
def _duckdb_errors(kind: type[Exception], log: str | Path) -> Iterator[None]:
    """DuckDB's errors derive from no error of Python's that says anything."""
    try:
        yield
    except kind as error:
        raise RuntimeError(f"building histories of {log}: {error}") from error
    except RuntimeError as error:
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise


def _source(db: "duckdb.DuckDBPyConnection", log: str | Path, user: str, item: str, time: str | None) -> str:
    """SQL whose rows are `user`, `item` (int64), `place`, which orders them, and `known`, null if one of these is."""
    name, place = str(log).lower(), re.sub(r"[*?\[]", r"[\g<0>]", _quoted(log))  # a path, no pattern
    if name.endswith((".parquet", ".parq", ".pq")):
        table = f"read_parquet('{place}')"
    elif name.endswith((".csv", ".csv.gz")):
        table = f"read_csv('{place}', header = true)"
    else:
        table = f"read_csv('{place}', header = false, delim = ' ')"
    names = [column[0] for column in db.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()]
    if names and names[0] == "column0":  # text without a header: names by position
        named = dict(zip(names, (user, item, time or "time"), strict=False))
        renamed = ", ".join(f"{old} AS {_name(new)}" for old, new in named.items())
        table = f"(SELECT {renamed} FROM {table})"
        names = list(named.values())
    if missing := [c for c in (user, item, time) if c is not None and c not in names]:
        raise ValueError(f"{log} must have the columns {missing}, it has {names}")
    types = {name: kind for name, kind, *_ in db.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}
    for column in (user, item):
        if "INT" not in types[column]:
            raise ValueError(
                f"{log}: column {column!r} must hold integers, got {types[column]}: number users and items"
            )
    order = "row_number() OVER ()" if time is None else f"struct_pack(t := {_name(time)}, n := row_number() OVER ())"
    known = " AND ".join(f"{_name(c)} IS NOT NULL" for c in (user, item, time) if c is not None)
    return (
        f'SELECT {_name(user)}::BIGINT AS "user", {_name(item)}::BIGINT AS item, {order} AS place, '
        f"CASE WHEN {known} THEN true END AS known FROM {table}"
    )


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _quoted(path: str | Path) -> str:
    return str(path).replace("'", "''")
