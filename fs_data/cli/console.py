"""What all commands share: tables and progress for people, one JSON line for programs, errors in one line."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_out, _err = Console(), Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON, in place of tables.")]
Column = Annotated[str, typer.Option(help="Column of histories: lists of items.")]
Data = Annotated[str, typer.Argument(help="Parquet file, folder, glob or URL.", metavar="DATA")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors of input end the command with status 1 and one line that names the culprit and the way out."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        _err.print(
            f"fs-data: {' '.join(str(error).split())}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on the error stream while something long runs; gives a function that takes how much was done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is text and whose others are figures."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _out.print(table)


def say(text: str) -> None:
    _out.print(text, markup=False, highlight=False, soft_wrap=True)


def say_json(**figures: Any) -> None:
    print(json.dumps({name: plain(value) for name, value in figures.items()}))


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def per_cent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) >= 0.001 or share == 0 else f"{100 * share:.2f} %"
