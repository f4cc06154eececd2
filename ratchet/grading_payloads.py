"""What crosses Temporal when tasks are admitted and stored patches are graded again.

Why here: as in `payloads.py`, for `AdmitTasks` and `Regrade`.
Called by: `workflows/admit_tasks.py`, `workflows/regrade.py`, their activities, and the CLI.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from ratchet.payloads import Payload, StageOptions


class AdmitInput(Payload):
    """Which tasks of a dataset to examine, and how often each patch is graded.

    `labels` empty: all. `again`: also tasks that the present version of their grader has examined. `after` is set by continue-as-new.
    """

    dataset: str
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    repeats: int = 3
    labels: list[str] = Field(default_factory=list)
    limit: int | None = None
    again: bool = False
    window: int = 4
    eval_seconds: float = 600
    workspace_seconds: float = 300
    after: int = -1
    counts: dict[str, int] = Field(default_factory=dict)


class AdmitPage(Payload):
    """The next tasks, (task id, label) in file order; `last` is the row number of the last, None at the end."""

    tasks: list[tuple[int, str]]
    last: int | None
    trial: StageOptions
    record: StageOptions


class TrialInput(Payload):
    """One grade of the gold or of the empty patch of a task, in a box of its own."""

    task_id: int
    patch: Literal["gold", "empty"]
    repeat: int
    eval_seconds: float
    workspace_seconds: float


class TrialResult(Payload):
    """`failed`: expected tests that did not pass, at most fifty of them. `error`: no verdict could be given."""

    patch: Literal["gold", "empty"]
    solved: bool = False
    reason: str = ""
    seconds: float = 0.0
    failed: list[str] = Field(default_factory=list)
    error: str = ""


class AdmissionInput(Payload):
    task_id: int
    trials: list[TrialResult]


class AdmissionResult(Payload):
    admitted: bool
    reason: str


class AdmitResult(Payload):
    admitted: int
    quarantined: int


class RegradeInput(Payload):
    """Stored patches are graded again: of a whole run or of one rollout.

    `grader` None: the task's own. `adopt`: the new verdict decides the rollout's reward where no step has used its group yet.
    `after` is set by continue-as-new.
    """

    run_id: str | None = None
    rollout_id: int | None = None
    grader: str | None = None
    repeats: int = 1
    adopt: bool = False
    window: int = 4
    after: int = 0
    counts: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.run_id is None) == (self.rollout_id is None):
            raise ValueError("give exactly one of run_id and rollout_id")
        return self


class RegradePage(Payload):
    """(rollout id, attempt, patch id) of what is to be graded again; empty at the end."""

    patches: list[tuple[int, int, int]]
    stages: dict[str, StageOptions]
    grade_tries: int


class RegradedInput(Payload):
    rollout_id: int
    patch_id: int
    grade_ids: list[int]
    adopt: bool


class RegradedResult(Payload):
    """`solved` of `graded` repeats; `changed`: the verdict differs from the one that the rollout was paid for."""

    rollout_id: int
    graded: int
    solved: int
    changed: bool
    adopted: bool


class RegradeResult(Payload):
    rollouts: int
    changed: int
    flaky: int
    adopted: int
    without_verdict: int
