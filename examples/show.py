"""What a person sees while the example runs: a progress bar on a terminal, plain lines elsewhere."""

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StepBar:
    """Counts the steps of an epoch; silent on all ranks but one."""

    def __init__(self, title: str, *, enabled: bool) -> None:
        self._console = Console(file=sys.stderr)
        self._enabled = enabled
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._progress.add_task(title, total=None)  # nobody knows before the first rank has run out

    def __enter__(self) -> "StepBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self) -> None:
        self._progress.advance(self._task)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._enabled:
            self._console.print(line, highlight=False)
