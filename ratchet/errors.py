"""Every error that crosses a boundary, in one tree.

Why here: each failure belongs to exactly one boundary and is classified once, where it is raised.
Called by: everything above `ratchet.types`; `activities/stage.py` turns the class into Temporal's retry decision.

    RatchetError
    ├── UserError                 the user's mistake or machine: one sentence, exit code 2
    │   ├── ConfigError           a config key or value
    │   ├── DatasetError          a row: file, row, field, what was expected
    │   └── MachineError          something missing on this machine: bubblewrap, a port, disk, a database
    ├── SandboxBusyError          the sandbox service is busy or cannot be reached now
    ├── SandboxGoneError          the box does not exist any more
    ├── CommandFailedError        a command in a box ended with a non-zero status or ran out of time
    ├── BoxSpentError             a box was already used by another try: boot a new one
    ├── EngineUnavailableError    no engine answers, or all are paused
    ├── EngineRejectedError       the engine refused a request (4xx): asking again cannot help
    ├── StoreUnavailableError     Postgres cannot be reached
    ├── LearnerLostError          the learner has been silent, or owes a checkpoint, for too long
    ├── GraderFailedError         the grader itself could not run
    ├── FencedError               a stale try or a zombie process wrote; its write matched no row
    └── BugError                  anything not named here: never retried, ends one rollout, never loops

| boundary          | error                  | retried by                  | recorded as                        |
|-------------------|------------------------|-----------------------------|------------------------------------|
| activity ↔ box    | SandboxBusyError       | Temporal, after a delay     | nothing: it happens again          |
| activity ↔ box    | SandboxGoneError       | the workflow: a new box     | attempt lost; infra_failed after 3 |
| activity ↔ box    | CommandFailedError     | nobody                      | the stage's own outcome            |
| activity ↔ box    | BoxSpentError          | the workflow: a new box     | nothing                            |
| adapter ↔ engine  | EngineUnavailableError | the adapter, under pings    | engine wait of the turn            |
| adapter ↔ engine  | EngineRejectedError    | nobody                      | the vendor's 400 to the agent      |
| any ↔ Postgres    | StoreUnavailableError  | Temporal / the client's SDK | nothing                            |
| workflow ↔ learner| LearnerLostError       | Temporal, for ever          | the stage's failure, in its UI     |
| grade             | GraderFailedError      | the workflow: a new box     | grader_failed after 3              |
| any               | FencedError            | nobody                      | nothing: another try owns the row  |
"""

from typing import ClassVar


class RatchetError(Exception):
    """Base of all; `retryable` says whether Temporal may run the same activity again."""

    retryable: ClassVar[bool] = False


class UserError(RatchetError):
    """The user's mistake or machine. The message is one sentence: what is wrong, which value, what to do."""


class ConfigError(UserError):
    """A config key or value cannot be used."""


class DatasetError(UserError):
    """A dataset row cannot be used: names file, row number, field and what was expected."""


class MachineError(UserError):
    """Something this machine lacks or forbids; the message names the remedy."""


class SandboxBusyError(RatchetError):
    """The sandbox service is busy, rate-limited or unreachable; the same call may go through later.

    `retry_after_seconds` is the service's own hint, None where it gave none.
    """

    retryable = True

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SandboxGoneError(RatchetError):
    """The box was killed, expired or never existed. A new box is the only remedy."""


class CommandFailedError(RatchetError):
    """A command in a box failed: `exit_code` is None exactly when `timed_out`.

    `stdout` and `stderr` hold what the command printed, as text with undecodable bytes replaced.
    """

    def __init__(self, command: str, exit_code: int | None, stdout: str, stderr: str, timed_out: bool = False) -> None:
        reason = "ran out of time" if timed_out else f"ended with exit code {exit_code}"
        tail = (stderr or stdout).strip()[-400:]
        shown = " ".join(command.split())
        super().__init__(f"`{shown[:60]}{'…' if len(shown) > 60 else ''}` {reason}" + (f": {tail}" if tail else ""))
        self.command, self.exit_code, self.stdout, self.stderr, self.timed_out = (
            command,
            exit_code,
            stdout,
            stderr,
            timed_out,
        )


class BoxSpentError(RatchetError):
    """The box has been used by an earlier try of this stage; what it holds cannot be trusted."""


class EngineUnavailableError(RatchetError):
    """No engine can take the call now (none ready, paused, died in mid-call)."""

    retryable = True


class EngineRejectedError(RatchetError):
    """The engine answered 4xx: the request itself is wrong."""


class StoreUnavailableError(RatchetError):
    """Postgres cannot be reached or refused the connection."""

    retryable = True


class LearnerLostError(RatchetError):
    """The learner has not written its heartbeat for longer than its lease, or not yet the checkpoint that a run ends with."""

    retryable = True


class GraderFailedError(RatchetError):
    """The grader could not run, so there is no verdict. Never a reward of 0."""


class FencedError(RatchetError):
    """Another try or process owns the row: this one has to stop without a trace."""


class BugError(RatchetError):
    """Our mistake: an assertion or an unclassified exception."""
