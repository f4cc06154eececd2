"""Frame the output of an exec: a shell in the box writes an end mark behind each stream of a command.

A connection that breaks looks like the end of the output, and the daemon's exit code does not tell what has arrived.
Output is therefore complete only if its end mark has come, which also carries the command's exit code.
"""

import re
import secrets

MARK_VARIABLE = "RATCHET_END_MARK"
_MARK_START = "\x1e"  # rare in text, so that hardly any output is held back until more comes
_TRIES = 50

# Runs in any POSIX shell. The mark is in the environment, because every user of the box can read arguments. The traps,
# which the command does not inherit, keep the shell alive for the mark if the command ends its process group. The
# shell's own error output is closed, because it names commands that a signal has killed. A mark is written again if the
# command has left a full pipe that does not block.
_SCRIPT = f"""
ratchet_mark=${MARK_VARIABLE}; unset {MARK_VARIABLE}; trap : HUP INT PIPE TERM; exec 3>&2 2>/dev/null
(exec "$@" 2>&3 3>&-)
ratchet_code=$?; ratchet_tries=0
until echo "$ratchet_mark $ratchet_code." || [ $ratchet_tries -ge {_TRIES} ]; do
  ratchet_tries=$((ratchet_tries + 1)); sleep 0.1
done
until echo "$ratchet_mark $ratchet_code." >&3 || [ $ratchet_tries -ge {_TRIES} ]; do
  ratchet_tries=$((ratchet_tries + 1)); sleep 0.1
done
exit 0
"""


def new_mark() -> str:
    """Return an end mark that no output contains by chance."""
    return _MARK_START + secrets.token_hex(16)


def framed(arguments: list[str]) -> list[str]:
    """Return a command that runs `arguments` and ends with status 0 once it has written the mark of MARK_VARIABLE."""
    return ["/bin/sh", "-c", _SCRIPT, "framed", *arguments]


class MarkedStream:
    """One stream of a framed command. `exit_code`: None until the end mark has come."""

    def __init__(self, mark: str) -> None:
        self.exit_code: int | None = None
        self._mark = mark.encode()
        self._end = re.compile(re.escape(self._mark) + rb" ([0-9]{1,3})\.")
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what is output for certain; the rest is held back. What children write after the mark is dropped."""
        if self.exit_code is not None:
            return b""
        data = self._held + data
        if (end := self._end.search(data)) is not None:
            self.exit_code = int(end[1])
            return data[: end.start()]
        place = self._possible_end(data)
        self._held = data[place:]
        return data[:place]

    def _possible_end(self, data: bytes) -> int:
        """Return where a mark may begin whose rest has not come yet."""
        start = max(0, len(data) - len(self._mark) - len(" 255."))
        while (place := data.find(self._mark[:1], start)) >= 0:
            tail = data[place : place + len(self._mark)]
            if self._mark.startswith(tail):
                return place
            start = place + 1
        return len(data)
