"""The health of each part: states, transitions, and the file with them, which only the watcher writes (`watcher.py`).

| state | meaning |
|---|---|
| stopped | supervisord does not run the part |
| starting | a process runs, or is about to, and no probe has succeeded since its start |
| answering | the newest probe succeeded |
| slow, failing | the newest probe did not succeed; the second table tells them apart |
| waiting | the clock stands still: a part that it needs does not answer, or no restart would help |
| restarting | the watcher ends the process, supervisord starts another one |
| given_up | too many short lives (MAX_SHORT_LIVES) or slow starts (MAX_SLOW_STARTS); it is stopped |

| from | event | to |
|---|---|---|
| stopped | supervisord runs it | starting |
| starting, slow, failing, waiting | a probe succeeds | answering |
| starting | no success for `start_seconds`, twice as long after each start of the part that ended so | restarting |
| answering, slow, failing | a probe does not succeed | slow or failing |
| slow, failing | a part that it needs does not answer, or a probe says that a restart would not help | waiting |
| waiting | every part that it needs answers, and a probe fails for another reason | failing |
| slow, failing | no success for `failing_seconds` | restarting |
| restarting | another process runs | starting; counted as a restart |
| restarting | the same process runs after END_SECONDS | restarting: it is ended again |
| any but given_up | its process ends by itself | starting; counted as a restart |
| any | the last of too many short lives or slow starts ends | given_up; runs that need it are paused with its error |
| any but given_up | supervisord was told to stop it | stopped |
| given_up | `ratchet up` starts it | starting, with all counters at zero |

A probe that does not succeed is late (no answer, or no other sign of life, within its time) or fails: the part refuses,
answers wrongly, or its process is suspended.

| newest probe | process and machine | state | clock of the restart |
|---|---|---|---|
| fails | | failing | real time |
| late | the first late one, or the process uses CPU, or the machine is busy | slow | at the machine's pace |
| late | the process uses no CPU, the machine is not busy | failing | real time |
| none has succeeded yet | | starting | at the machine's pace |

The machine's pace is the share of time in which nothing waits for CPU, disk or memory, and at least SLOWEST_PACE: on a
machine that is always busy a part is restarted ten times as late as on a quiet one.

If the watcher dies, nothing is lost: the next one reads the file and goes on, and supervisord restarts a part that has
ended without any watcher.
"""

import json
import time
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path

from ratchet.durations import duration_in_words
from ratchet.types import JsonObject

MAX_SHORT_LIVES = 5
WINDOW_SECONDS = 1800.0
STABLE_SECONDS = 30.0
MAX_SLOW_STARTS = 4
END_SECONDS = 90.0
SLOWEST_PACE = 0.1
STALE_SECONDS = 30.0
"""Age of the file above which its contents say nothing about now."""


class HealthState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    ANSWERING = "answering"
    SLOW = "slow"
    FAILING = "failing"
    WAITING = "waiting"
    RESTARTING = "restarting"
    GIVEN_UP = "given_up"


_UNANSWERED = (HealthState.SLOW, HealthState.FAILING)


class HealthAction(StrEnum):
    """The action that the watcher must take on the part's process."""

    NOTHING = "nothing"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Time limits of one part in seconds. `probe_seconds`: of one probe; `interval_seconds`: between two probes."""

    probe_seconds: float = 10.0
    interval_seconds: float = 5.0
    failing_seconds: float = 60.0
    start_seconds: float = 300.0


@dataclass(slots=True)
class PartHealth:
    """One part. Times are seconds since the epoch.

    `since`: when the state began; slow and failing are one time without an answer. `counted_from`: as `since`, moved
    on by time that no limit counts. `reason`: why it does not answer. `detail`: what the newest successful probe found.
    `restarts`: processes that ended since `ratchet up`, however they ended. `last_error`: of the process that ended
    last, the first in its log. `started_at`: when supervisord started the newest process, `pid` while it lives.
    `first_answer_at` and `last_answer_at`: of the current process. `short_lives`: the ends that count towards
    giving up. `slow_starts`: processes in a row that were ended because they did not answer in time after their start;
    the next one gets longer. `runs_paused`: the part is given up, and the runs that need it have been paused.
    """

    name: str
    state: HealthState = HealthState.STOPPED
    since: float = 0.0
    reason: str = ""
    detail: str = ""
    restarts: int = 0
    last_error: str = ""
    pid: int | None = None
    started_at: float = 0.0
    first_answer_at: float | None = None
    last_answer_at: float = 0.0
    short_lives: list[float] = field(default_factory=list)
    slow_starts: int = 0
    runs_paused: bool = False
    restart_helps: bool = True
    counted_from: float = 0.0

    def __post_init__(self) -> None:
        self.counted_from = self.counted_from or self.since

    def enter(self, state: HealthState, now: float, reason: str = "") -> None:
        if state is not self.state:
            self.state = state
            self.since = self.counted_from = now
        self.reason = reason

    def num_ended(self, pid: int | None, started_at: float) -> int:
        """Return how many ends of processes are seen that were not seen at the last look: that of the one that lived
        then, and that of the newest if it was never seen alive. More may have come and gone between the two."""
        never_seen = pid is None and self.started_at != started_at
        return (self.pid is not None and pid != self.pid) + never_seen

    def see_process(
        self, pid: int | None, started_at: float, wanted: bool, now: float, last_error: str
    ) -> HealthAction:
        """Take in supervisord's view. `pid`: while the process lives. `wanted`: it runs the part or starts it again."""
        if not wanted:
            if self.state is not HealthState.GIVEN_UP:
                self._begin(HealthState.STOPPED, now)
            self.started_at = started_at
            return HealthAction.NOTHING
        if self.state in (HealthState.STOPPED, HealthState.GIVEN_UP):  # a person has started it
            self._begin(HealthState.STARTING, now)
        ended = self.num_ended(pid, started_at)
        self.pid = pid
        self.started_at = started_at
        for _ in range(ended):
            if self._see_end(now, last_error) is HealthAction.STOP:
                return HealthAction.STOP
        return HealthAction.NOTHING

    def _begin(self, state: HealthState, now: float) -> None:
        self.enter(state, now)
        self.pid = None
        self.started_at = 0.0
        self.restarts = 0
        self.last_error = ""
        self.first_answer_at = None
        self.short_lives = []
        self.slow_starts = 0
        self.runs_paused = False
        self.restart_helps = True

    def _see_end(self, now: float, last_error: str) -> HealthAction:
        """Record that a process has ended."""
        was_ended = self.state is HealthState.RESTARTING
        reason = self.reason if was_ended else "its process has ended"
        self.last_error = reason if was_ended else last_error or reason
        self.restarts += 1
        if self.first_answer_at is None or self.last_answer_at - self.first_answer_at < STABLE_SECONDS:
            self.short_lives.append(now)
        self.short_lives = [at for at in self.short_lives if now - at < WINDOW_SECONDS]
        self.first_answer_at = None
        if len(self.short_lives) >= MAX_SHORT_LIVES or self.slow_starts >= MAX_SLOW_STARTS:
            reason = f"it ended {len(self.short_lives)} times within {WINDOW_SECONDS / 60:.0f} minutes"
            if self.slow_starts >= MAX_SLOW_STARTS:
                reason = f"it did not answer after {self.slow_starts} starts"
            self.enter(HealthState.GIVEN_UP, now, f"{reason}; `ratchet up` starts it again")
            self.pid = None
            return HealthAction.STOP
        self.state = HealthState.STARTING
        self.since = self.counted_from = now
        self.reason = reason
        return HealthAction.NOTHING

    def see_success(self, detail: str, now: float) -> None:
        if self.state in (HealthState.STARTING, *_UNANSWERED, HealthState.WAITING, HealthState.ANSWERING):
            if self.first_answer_at is None:
                self.first_answer_at = now
            self.last_answer_at = now
            self.slow_starts = 0
            self.enter(HealthState.ANSWERING, now)
            self.detail = detail
            self.restart_helps = True

    def see_failure(self, reason: str, now: float, restart_helps: bool = True, is_slow: bool = False) -> None:
        """Record a failed probe. `restart_helps` False: a person's setting stops it. `is_slow`: by the second table."""
        self.restart_helps = restart_helps
        if self.state is HealthState.ANSWERING:
            self.enter(HealthState.FAILING, now)
        if self.state in _UNANSWERED:
            self.state = HealthState.SLOW if is_slow else HealthState.FAILING
        if self.state in (HealthState.STARTING, *_UNANSWERED, HealthState.WAITING):
            self.reason = reason

    def act(self, limits: HealthLimits, missing: str | None, now: float) -> HealthAction:
        """Return what must be done now. `missing`: a part that this one needs and that does not answer."""
        if missing is not None or not self.restart_helps:
            if self.state in _UNANSWERED:
                self.state = HealthState.WAITING
            if self.state in (HealthState.WAITING, HealthState.STARTING):
                self.counted_from = now  # its clock stands still
                self.reason = self.reason if missing is None else f"waits for {missing}"
        elif self.state is HealthState.WAITING:
            self.enter(HealthState.FAILING, now, "what it waited for answers again")
        counted = now - self.counted_from
        if self.state is HealthState.RESTARTING and counted > END_SECONDS:
            self.counted_from = now
            return HealthAction.RESTART
        limit = None
        if self.state in _UNANSWERED:
            limit = limits.failing_seconds
        elif self.state is HealthState.STARTING:
            limit = limits.start_seconds * 2**self.slow_starts
        if limit is not None and self.pid is not None and counted > limit:
            self.slow_starts += self.state is HealthState.STARTING
            self.enter(HealthState.RESTARTING, now, f"no answer for {now - self.since:.0f} s: {self.reason}")
            return HealthAction.RESTART
        return HealthAction.NOTHING

    def hold(self, seconds: float) -> None:
        """Do not count so many seconds: the watcher itself did not run, or see `pass_time`."""
        self.counted_from += seconds

    def pass_time(self, seconds: float, pace: float) -> None:
        """Let a time pass that the limits of a slow or starting part count at the machine's pace."""
        if self.state in (HealthState.SLOW, HealthState.STARTING):
            self.hold(seconds * (1 - pace))

    def summary(self, now: float) -> str:
        """Return one sentence for a person; empty if the part answers."""
        if self.state in (HealthState.ANSWERING, HealthState.STOPPED):
            return ""
        words = f"{self.state.replace('_', ' ')} for {duration_in_words(now - self.since)}"
        if self.state is HealthState.SLOW:
            words = f"slow, last answer {duration_in_words(now - self.last_answer_at)} ago"
        if self.reason:
            words += f": {self.reason}"
        if self.last_error and self.last_error not in words:
            words += f"; its error: {self.last_error}"
        return words


def health_path(home: Path) -> Path:
    return home / "health.json"


def write_health(home: Path, parts: list[PartHealth], now: float) -> None:
    """Replace the file; a reader sees the old or the new one."""
    temporary = health_path(home).with_suffix(".tmp")
    temporary.write_text(json.dumps({"written_at": now, "parts": [asdict(part) for part in parts]}))
    temporary.rename(health_path(home))


def read_health(home: Path) -> dict[str, PartHealth]:
    """Return part → newest state, empty if it cannot be read; fields of later versions are ignored."""
    known = {one.name for one in fields(PartHealth)}
    try:
        rows: list[JsonObject] = json.loads(health_path(home).read_text())["parts"]
        kept = [{name: value for name, value in row.items() if name in known} for row in rows]
        return {row["name"]: PartHealth(**{**row, "state": HealthState(row["state"])}) for row in kept}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def health_written_at(home: Path) -> float | None:
    """Return when a watcher last wrote the file, in seconds since the epoch; None without a file."""
    try:
        return float(json.loads(health_path(home).read_text())["written_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_fresh_health(home: Path) -> dict[str, PartHealth] | None:
    """Return the newest state of every watched part; None without a file, or if it says nothing about now."""
    try:
        age_seconds = time.time() - health_path(home).stat().st_mtime
    except OSError:
        return None
    return read_health(home) if age_seconds < STALE_SECONDS else None
