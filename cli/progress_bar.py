"""One bar at the bottom of a terminal for lines that say how much is done; other lines scroll above it."""

import atexit

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ratchet.progress import CountedLine


class ProgressBar:
    """The bar of this process. It disappears when its work is done, and at the end of the process."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[estimate]}"),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._what = ""
        atexit.register(self._progress.stop)

    def show(self, line: CountedLine, elapsed: str, estimate: str = "") -> None:
        """Draw the bar at this line, with the `estimate` of the rest behind it; the line is printed if it is the first
        or the last of its work."""
        if line.done >= line.total:
            self.print_above(f"{elapsed} {line}")
            self._end()
            return
        if self._task is None or line.what != self._what:
            self._end()
            self.print_above(f"{elapsed} {line}")
            self._task = self._progress.add_task("", total=line.total, completed=line.done, estimate="")
            self._what = line.what
        said, left = f"{elapsed} {line}", estimate.removeprefix("; ")
        self._progress.update(self._task, description=said, completed=line.done, total=line.total, estimate=left)
        self._progress.start()

    def print_above(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None
