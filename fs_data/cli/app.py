"""The commands of `fs-data`."""

import typer

from fs_data.cli.balance import balance
from fs_data.cli.build import build
from fs_data.cli.generate import generate
from fs_data.cli.inspect import inspect
from fs_data.cli.report import report

app = typer.Typer(
    help="Histories in parquet: make them, look at them, and see what balancing would save before adopting it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (generate, build, inspect, balance, report):
    app.command()(command)
