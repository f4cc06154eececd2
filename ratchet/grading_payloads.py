"""Arguments and results of `AdmitTasks` and `Regrade`; the rules of `payloads.py` apply."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from ratchet.bounded_numbers import LARGEST_INTEGER, NotNegative, Positive, RowId, Seconds
from ratchet.config_sections import TestsUser
from ratchet.payloads import Payload, StageOptions, StartInput
from ratchet.types import OpenedUse


class AdmitInput(StartInput):
    """Argument of AdmitTasks: which tasks of a dataset to examine, and how often each patch is graded.

    `labels` empty: all. `again`: examine tasks again that the present version of their grader has examined.
    `broken_oracles`: size of the pool that is made for each admitted task. `network`, `user`: as `sandbox.network` and
    `grading.user` of a run. `after` and `counts` are set by continue-as-new.
    """

    dataset: str
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    repeats: Positive = 3
    labels: list[str] = Field(default_factory=list)
    limit: NotNegative | None = None
    again: bool = False
    broken_oracles: NotNegative = 4
    network: list[OpenedUse] = Field(default_factory=list)
    user: TestsUser = "agent"
    window: Positive = 4
    eval_seconds: Seconds = 600
    workspace_seconds: Seconds = 300
    after: Annotated[int, Field(ge=-1, le=LARGEST_INTEGER)] = -1
    counts: dict[str, int] = Field(default_factory=dict)


class LabelledTask(NamedTuple):
    task_id: int
    label: str


class AdmitPage(Payload):
    """The next tasks in file order. `last`: row number of the last one, None at the end of the dataset."""

    tasks: list[LabelledTask]
    last: int | None
    trial: StageOptions
    record: StageOptions


Trial = Literal["gold", "empty", "broken", "grade", "control"]


class TrialInput(Payload):
    """One run of a task's hidden tests in a new box: on its gold patch, on an empty one, on the gold patch with broken
    tests (`broken`), or on the gold patch as a rollout's grade judges it (`grade`). `repeat` counts the runs of each
    kind. `failing`: tests that failed without a patch. `failed_at`: lines of files that this run's log names."""

    task_id: int
    patch: Trial
    repeat: int
    eval_seconds: float
    workspace_seconds: float
    failing: list[str] = Field(default_factory=list)
    failed_at: list[str] = Field(default_factory=list)
    network: list[OpenedUse] = Field(default_factory=list)
    user: str = "agent"


class TrialResult(Payload):
    """Verdict of one trial. `failed`: at most fifty expected tests that did not pass. `failed_at`: lines of files that
    the log of an empty patch names, as `NAME:LINE`. `left_out`: files that a grade without control runs leaves out of
    the patch, or whose runner settings it puts back. `error`: why there is no verdict.

    Of a broken trial `solved` means that the gold patch failed the broken tests as it should: they joined the pool. A
    `grade` trial becomes a `control` trial if it ran only the tests that control runs repeat; `solved`: they passed.
    `user`: the admission's user that ran the tests, empty if the row names another.
    """

    patch: Trial
    solved: bool = False
    reason: str = ""
    seconds: float = 0.0
    failed: list[str] = Field(default_factory=list)
    failed_at: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    error: str = ""
    user: str = ""


class AdmissionInput(Payload):
    """All trials of one task."""

    task_id: int
    trials: list[TrialResult]


class AdmissionResult(Payload):
    """The decision on one task; `reason` is empty if it was admitted."""

    admitted: bool
    reason: str


class AdmitResult(Payload):
    """Number of tasks that AdmitTasks has admitted and quarantined."""

    admitted: int
    quarantined: int


class RegradeInput(StartInput):
    """Argument of Regrade: grade the stored patches of a run, of a group (its workflow id) or of one rollout again.

    `grader` None: the task's own. `adopt`: the new verdict decides the rollout's reward; steps that have used it
    keep the one that they trained. `datasets`: digests of datasets whose tests for the same work replace a task's.
    `after` and `counts` are set by continue-as-new.
    """

    run_id: str | None = None
    rollout_id: RowId | None = None
    group: str | None = None
    grader: str | None = None
    repeats: Positive = 1
    adopt: bool = False
    window: Positive = 4
    datasets: list[str] = Field(default_factory=list)
    after: RowId = 0
    counts: dict[str, int] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(value is not None for value in (self.run_id, self.rollout_id, self.group)) != 1:
            raise ValueError("give exactly one of run_id, rollout_id and group")
        return self


class StoredPatch(NamedTuple):
    rollout_id: int
    attempt: int
    patch_id: int


class RegradePage(Payload):
    """The next patches to grade again; empty at the end."""

    patches: list[StoredPatch]
    stages: dict[str, StageOptions]
    grade_tries: int


class RegradedInput(Payload):
    """The new verdicts on one patch."""

    rollout_id: int
    patch_id: int
    grade_ids: list[int]
    adopt: bool


class RegradedResult(Payload):
    """`solved` of `graded` repeats. `changed`: the verdict differs from the one that decided the rollout's reward."""

    rollout_id: int
    graded: int
    solved: int
    changed: bool
    adopted: bool


class RegradeResult(Payload):
    """Number of rollouts graded again, and of those with a changed, flaky, adopted or missing verdict."""

    rollouts: int
    changed: int
    flaky: int
    adopted: int
    without_verdict: int
