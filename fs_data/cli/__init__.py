"""The `fs-data` command: what a team looks at before it adopts balancing, on its own data."""

import sys


def main() -> None:
    """Console script `fs-data`."""
    try:
        from fs_data.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"fs-data needs {error.name}: pip install 'freescale[cli]'")
    app()
