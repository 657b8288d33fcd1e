"""The `fs-data` command: what a team looks at before it adopts balancing, on its own data."""

import sys
from io import TextIOWrapper


def main() -> None:
    """Console script `fs-data`."""
    try:
        from fs_data.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"fs-data needs {error.name}: pip install 'freescale[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    try:
        app()
    except OSError as error:
        sys.exit(f"fs-data: the results must be written: {error}")
