"""One bar at the bottom of a terminal for lines that say how much is done; other lines scroll above it."""

import atexit

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ratchet.progress import CountedLine

_SPEED_SECONDS = 3600.0
"""The rest is estimated from the speed within so long; a step of training alone takes minutes."""


class ProgressBar:
    """The bar of this process. It disappears when its work is done, and at the end of the process."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("left"),
            console=console,
            transient=True,
            speed_estimate_period=_SPEED_SECONDS,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._what = ""
        atexit.register(self._progress.stop)

    def show(self, line: CountedLine, elapsed: str) -> None:
        """Draw the bar at this line; the line is printed if it is the first or the last of its work."""
        if line.done >= line.total:
            self.print_above(f"{elapsed} {line}")
            self._end()
            return
        if self._task is None or line.what != self._what:
            self._end()
            self.print_above(f"{elapsed} {line}")
            self._task = self._progress.add_task("", total=line.total, completed=line.done)
            self._what = line.what
            self._progress.start()
        self._progress.update(self._task, description=f"{elapsed} {line}", completed=line.done, total=line.total)

    def print_above(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None
