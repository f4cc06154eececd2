"""The command that a box runs now, as the heartbeats of a stage show it to people who wait for it."""

import time
from datetime import UTC

from temporalio import activity

from grading.git_scripts import PRE_COMMAND_BEGINS
from ratchet.durations import duration_in_words
from ratchet.secrets import without_secrets

_MAX_COMMAND_CHARACTERS = 200
_MAX_LINE_CHARACTERS = 200
_MAX_PIECE_CHARACTERS = 4096
"""Longest rest of a line that is kept until its end comes."""


class RunningPreCommand:
    """The pre_command of a task that runs now, from the error output of the script of `git_scripts.prepare_script`.

    `pre_commands`: those of the task, empty until it is known.
    """

    pre_commands: list[str]

    def __init__(self) -> None:
        self.pre_commands = []
        self._number: int | None = None
        self._since = time.monotonic()
        self._last_line = ""
        self._rest = ""

    def read(self, piece: str) -> None:
        """Take the next piece of the error output."""
        *lines, rest = (self._rest + piece).split("\n")
        self._rest = rest[-_MAX_PIECE_CHARACTERS:]
        for line in lines:
            begins = PRE_COMMAND_BEGINS.fullmatch(line)
            if begins and int(begins[1]) < len(self.pre_commands):
                self._number = int(begins[1])
                self._since = time.monotonic()
                self._last_line = ""
            elif line.strip():
                self._last_line = line.strip()

    async def told(self) -> str:
        """Return the command, for how long it has run, its last line of output, and when this try ends."""
        if self._number is None:
            return f"the repository is unpacked; {try_ends()}"
        command = shortened(self.pre_commands[self._number])
        which = f"pre_command {self._number + 1} of {len(self.pre_commands)}"
        last = without_secrets(self._last_line)[:_MAX_LINE_CHARACTERS]
        said = f"; it printed last: {last}" if last else ""
        return (
            f"{which} has run for {duration_in_words(time.monotonic() - self._since)}: `{command}`{said}; {try_ends()}"
        )


def try_ends() -> str:
    """Return when the present try of this activity is ended if it has not come to an end by itself."""
    info = activity.info()
    if info.start_to_close_timeout is None:
        return "this try has no limit"
    ends = (info.started_time + info.start_to_close_timeout).astimezone(UTC)
    return f"this try ends at {ends:%Y-%m-%d %H:%M:%S} UTC at the latest"


def shortened(command: str) -> str:
    """Return a command as one line of bounded length, without secrets."""
    line = " ".join(without_secrets(command).split())
    return line if len(line) <= _MAX_COMMAND_CHARACTERS else line[: _MAX_COMMAND_CHARACTERS - 1] + "…"
