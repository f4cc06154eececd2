"""The errors that are raised in one package and handled in another, in one tree.

Each failure belongs to one boundary and is classified once, when it is raised. `activities/stage.py` turns the class
into Temporal's decision whether to retry; the CLI prints a `UserError` as one sentence and exits with 2. An error that
stays within one package is defined there.

    RatchetError
    ├── UserError                 a mistake of the user, or something that the machine lacks: one sentence, exit code 2
    │   ├── ConfigError           a config key or value cannot be used
    │   │   └── UnknownImageError the sandbox service does not have the image
    │   ├── DatasetError          a dataset row cannot be used: file, row, field, what was expected
    │   └── MachineError          the machine lacks something: bubblewrap, a port, disk space, a database
    ├── RetryableError            the same call may succeed later
    │   ├── SandboxBusyError      the sandbox service is busy or cannot be reached
    │   │   └── SandboxRefusesError it refuses this installation: its key, its quota, or the way to it
    │   ├── EngineUnavailableError no engine answers, or all are paused
    │   ├── StoreUnavailableError Postgres does not answer, or answers with an error of its own
    │   ├── WeightStorageError    the storage of weights does not answer, refuses, or gave damaged files
    │   ├── TemporalUnavailableError Temporal does not answer an activity's question about other workflows
    │   ├── WorkerHostError       the worker's machine refuses a file (its disk is full, for example) or has no network
    │   └── LearnerLostError      the learner has sent no heartbeat, or written no checkpoint, for too long
    ├── SandboxGoneError          the box does not exist any more
    ├── BuildFailedError          a step of a Dockerfile has failed, or its base image cannot be had
    ├── CommandFailedError        a command in a box ended with a non-zero status or ran out of time
    ├── BoxSpentError             another try has used the box: boot a new one
    ├── EngineRejectedError       the engine refused a request (4xx): a repeated request would fail, too
    ├── GraderFailedError         the grader could not run
    │   └── SuspectPatchError     no test failed in this box; if a second box shows the same, the patch is to blame
    ├── FencedError               a stale try or a replaced process wrote; its write matched no row
    └── BugError                  any unclassified exception: never retried, so that a bug ends one rollout

| boundary          | error                  | retried by                  | recorded as                        |
|-------------------|------------------------|-----------------------------|------------------------------------|
| user ↔ any        | UserError              | not retried                 | the run's or rollout's reason      |
| activity ↔ box    | SandboxBusyError       | Temporal, after a delay     | nothing: the call is repeated      |
| activity ↔ box    | SandboxGoneError       | the workflow: a new box     | attempt lost; infra_failed after 3 |
| activity ↔ builder of images | BuildFailedError | twice, by `build_image` | the reason of rollouts of that image |
| activity ↔ box    | CommandFailedError     | not retried                 | the stage's own outcome            |
| activity ↔ box    | BoxSpentError          | the workflow: a new box     | nothing                            |
| adapter ↔ engine  | EngineUnavailableError | the adapter (pings if streaming) | engine wait of the turn            |
| adapter ↔ engine  | EngineRejectedError    | not retried                 | the vendor's 400 to the agent      |
| activity ↔ Postgres | StoreUnavailableError | Temporal, after a delay   | nothing                            |
| service ↔ Postgres | StoreUnavailableError | the process; the adapter holds its calls | nothing               |
| service ↔ storage of weights | WeightStorageError | the process | engine details, learner's phase |
| activity ↔ Temporal | TemporalUnavailableError | Temporal, without limit (1) | the stage's failure, in its UI |
| activity ↔ its machine | WorkerHostError   | Temporal, without limit (1) | the stage's failure, in its UI     |
| workflow ↔ learner| LearnerLostError       | Temporal, without limit     | the stage's failure, in its UI     |
| grade             | GraderFailedError      | the workflow: a new box     | grader_failed after 3              |
| stage             | GuardSpentError        | not retried                 | infra_failed, or grader_failed     |
| any               | FencedError            | not retried                 | nothing: another try owns the row  |
| any               | BugError               | not retried                 | the workflow's failure, and a log  |

(1) In `workspace`, `grade` and `control_run`, which may use a box only once: by the workflow, in a new box after a
wait. Such tries are not counted, nor is their time.
"""

from typing import ClassVar

from ratchet.types import Suspicion


class RatchetError(Exception):
    """Base of all errors. `retryable`: whether Temporal may run the same activity again.

    `cli_exit_code`: that of `ratchet` if it ends with the error.
    """

    retryable: ClassVar[bool] = False
    cli_exit_code: ClassVar[int] = 1


class RetryableError(RatchetError):
    """A service does not answer, or not now: the same call may succeed later."""

    retryable = True


class UserError(RatchetError):
    """A mistake of the user, or of the machine's set-up. The message is one sentence: what, which value, what to do."""

    cli_exit_code = 2


class ConfigError(UserError):
    """A config key or value cannot be used."""


class UnknownImageError(ConfigError):
    """The sandbox service does not have the image. One that is built from a Dockerfile is then built."""


class DatasetError(UserError):
    """A dataset row cannot be used. The message names file, row number, field and what was expected."""


class MachineError(UserError):
    """The machine lacks or forbids something; the message names the remedy."""


class SandboxBusyError(RetryableError):
    """The sandbox service is busy, rate-limited or unreachable; the same call may succeed later.

    `retry_after_seconds` is the service's own hint, None if it gave none.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SandboxFullError(SandboxBusyError):
    """The sandbox service works, and has no room or capacity for this call now; calls wait for it."""


class SandboxRefusesError(SandboxBusyError):
    """The sandbox service refuses this installation's key, account, quota or address; calls wait for a person."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; the call is repeated until the service accepts it", retry_after_seconds=30.0)


class SandboxGoneError(RatchetError):
    """The box was killed, expired or never existed. Only a new box helps."""


class BuildFailedError(RatchetError):
    """A step of the Dockerfile has failed, or its base image cannot be had; the printed lines say why."""


class CommandFailedError(RatchetError):
    """A command in a box failed: `exit_code` is None exactly when `timed_out`.

    `stdout` and `stderr` hold what the command printed, as text with undecodable bytes replaced.
    """

    def __init__(self, command: str, exit_code: int | None, stdout: str, stderr: str, timed_out: bool = False) -> None:
        reason = "ran out of time" if timed_out else f"ended with exit code {exit_code}"
        printed = (stderr or stdout).strip()
        if len(printed) > 400:  # a cause comes first or last, and help texts follow it
            printed = f"{printed[:200]} … {printed[-200:]}"
        shown = " ".join(command.split())
        said = f": {printed}" if printed else ""
        super().__init__(f"`{shown[:60]}{'…' if len(shown) > 60 else ''}` {reason}{said}")
        self.command = command
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr
        self.timed_out = timed_out


class BoxSpentError(RatchetError):
    """An earlier try of this stage has used the box, so its contents cannot be trusted."""


class EngineUnavailableError(RetryableError):
    """No engine can take the call now (none ready, paused, died in mid-call)."""


class EngineRejectedError(RatchetError):
    """The engine answered 4xx: the request itself is wrong."""


class StoreUnavailableError(RetryableError):
    """Postgres cannot be reached, or answers with an error that a healthy server would not give."""


class WeightStorageError(RetryableError):
    """The storage of weights (`training.weights_address`) does not answer, refuses, or gave files that are damaged."""


class TemporalUnavailableError(RetryableError):
    """Temporal does not answer an activity's question about other workflows."""


class WorkerHostError(RetryableError):
    """The worker's machine refuses a file, process or connection: full disk, no memory, descriptors or network."""


class LearnerLostError(RetryableError):
    """The learner has sent no heartbeat for longer than its lease, or has not written the run's last checkpoint yet."""


class GraderFailedError(RatchetError):
    """The grader could not run, so there is no verdict; a second box may show that it is the patch's doing."""


class SuspectPatchError(GraderFailedError):
    """The run did not solve the task, but no test failed, or the log reports a full disk or no memory; that may be the
    machine's fault. The patch is to blame if a second box shows the same `suspicion`."""

    def __init__(self, reason: str, suspicion: Suspicion) -> None:
        super().__init__(reason)
        self.suspicion = suspicion


class GuardSpentError(RatchetError):
    """The rollout has had boxes for as long as its guard allows, outages not counted."""


class FencedError(RatchetError):
    """Another try or process owns the row; the one that raises this must stop and write nothing."""


class BugError(RatchetError):
    """A bug of this program: an assertion or an unclassified exception."""
