"""Words of the system as types: states and their transitions, and every payload that crosses Temporal.

Why here: one file holds each enum and each payload, so the database, the workflows and the CLI cannot drift apart.
Called by: everything; it imports nothing of ours.
"""

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

MODEL_NAME = "policy"
"""What engines serve the policy as, and what agents ask for."""

# ---------------------------------------------------------------- states


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    """`ready`: its rule holds and it may be planned. `consumed`: a plan row holds it. `failed`: its rule can no longer hold."""

    OPEN = "open"
    READY = "ready"
    CONSUMED = "consumed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Outcome(StrEnum):
    """How a rollout ended. NULL in the store exactly while it is open; only the first two carry a reward."""

    GRADED = "graded"
    REJECTED = "rejected"
    INFRA_FAILED = "infra_failed"
    GRADER_FAILED = "grader_failed"
    CANCELLED = "cancelled"


REWARDED_OUTCOMES = (Outcome.GRADED, Outcome.REJECTED)


class AgentExit(StrEnum):
    """How the agent's program ended. A fact, never an error; all but `starved` are graded."""

    DONE = "done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_FULL = "context_full"
    TIME_BUDGET = "time_budget"
    CRASHED = "crashed"
    STARVED = "starved"


class AttemptState(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    SUPERSEDED = "superseded"


class SessionState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class TurnState(StrEnum):
    """`in_flight` until the engine's answer is stored, `completed` before the answer's last byte goes out."""

    IN_FLIGHT = "in_flight"
    COMPLETED = "completed"
    ABORTED = "aborted"


class TurnKind(StrEnum):
    MAIN = "main"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    AUXILIARY = "auxiliary"


class ForkCause(StrEnum):
    """Why a turn does not extend its lane's newest stream. `root`: the first turn of a conversation."""

    ROOT = "root"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    EDIT = "edit"
    DRIFT = "drift"
    RESTART = "restart"
    STOP = "stop"
    THINKING = "thinking"


class SandboxRole(StrEnum):
    AGENT = "agent"
    GRADE = "grade"


class SandboxState(StrEnum):
    """Ledger of boxes: the row comes before the box, `release_wanted` before the kill."""

    CREATING = "creating"
    LIVE = "live"
    RELEASE_WANTED = "release_wanted"
    RELEASED = "released"


class BatchState(StrEnum):
    PLANNED = "planned"
    STEPPED = "stepped"
    COMMITTED = "committed"


class PolicyVersionState(StrEnum):
    PUBLISHED = "published"
    RETIRED = "retired"
    SUPERSEDED = "superseded"


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    SYNCING = "syncing"
    QUARANTINED = "quarantined"
    GONE = "gone"


class Wish(StrEnum):
    """What a user asked of a run; a wish is recorded in the run's row and honoured between steps."""

    NONE = "none"
    PAUSE = "pause"
    STOP = "stop"


TRANSITIONS: dict[type[StrEnum], dict[str, frozenset[str]]] = {
    GroupState: {
        "open": frozenset({"ready", "failed", "cancelled"}),
        "ready": frozenset({"consumed", "cancelled"}),
        "consumed": frozenset(),
        "failed": frozenset({"ready"}),
        "cancelled": frozenset(),
    },
    SandboxState: {
        "creating": frozenset({"live", "release_wanted", "released"}),
        "live": frozenset({"release_wanted", "released"}),
        "release_wanted": frozenset({"released"}),
        "released": frozenset(),
    },
    BatchState: {"planned": frozenset({"stepped", "committed"}), "stepped": frozenset({"committed"}), "committed": frozenset()},
    TurnState: {"in_flight": frozenset({"completed", "aborted"}), "completed": frozenset(), "aborted": frozenset()},
}


# ---------------------------------------------------------------- payloads (ids cross Temporal, data does not)


class Payload(BaseModel):
    """Base of everything that crosses Temporal: frozen, and an unknown field is the caller's mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StageOptions(Payload):
    """Retry and time limits of one stage, resolved from temporal.yaml and recorded in the history.

    Seconds throughout. `heartbeat_seconds` None: the stage does not heartbeat. `max_tries` 0: unlimited.
    """

    queue: str
    start_to_close_seconds: float
    heartbeat_seconds: float | None = None
    retry_initial_seconds: float = 1.0
    retry_max_seconds: float = 30.0
    max_tries: int = 0


class RolloutInput(Payload):
    """What starts one rollout.

    Either `rollout_id` (the row exists: the way groups start it), or a dataset and a task from the stock CLI, which then
    belongs to run `adhoc`. `task` is the row's label or its number (from 0) in the dataset. `config`: a whole run config, over whose
    values `dataset`, `model` and `harness` win. `model` and `policy_version`: what the engines must be serving, else it is refused.
    """

    rollout_id: int | None = None
    dataset: str | None = None
    task: str | int | None = None
    policy_version: str | None = None
    model: str | None = None
    harness: str | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.rollout_id is None and (self.dataset is None or self.task is None):
            raise ValueError("give dataset and task (a label, or a row number from 0), or rollout_id")
        return self


class RolloutResult(Payload):
    rollout_id: int
    outcome: Outcome
    reward: float | None
    agent_exit: AgentExit | None = None


class Claim(Payload):
    """A rollout as its workflow run owns it: what is left to do, and with which limits.

    `attempt` counts agent boxes and starts at 1. `patch_id`: a stored patch, so the agent's part is done.
    """

    rollout_id: int
    run_id: str
    group_id: int | None
    task_id: int
    outcome: Outcome | None = None
    reward: float | None = None
    attempt: int
    patch_id: int | None = None
    agent_budget_seconds: float
    eval_budget_seconds: float
    guard_seconds: float
    box_tries: int
    grade_tries: int
    stages: dict[str, StageOptions]
    summary: str


class RolloutRow(Payload):
    """A rollout that has a row: what `prepare_rollout` returns for one that was started from the stock CLI."""

    rollout_id: int
    stages: dict[str, StageOptions]


class Box(Payload):
    """A row of the sandbox ledger, live."""

    sandbox_id: int
    provider_id: str


class StageInput(Payload):
    """Argument of every stage that works in a box. `grader` None: the task's own; `repeat` counts grades of one patch."""

    rollout_id: int
    attempt: int
    sandbox_id: int | None = None
    patch_id: int | None = None
    role: SandboxRole = SandboxRole.AGENT
    grader: str | None = None
    repeat: int = 0


class StageResult(Payload):
    """`used_seconds` is measured by the box's own clock where the stage ran in one."""

    used_seconds: float = 0.0


class AgentResult(StageResult):
    agent_exit: AgentExit
    num_turns: int = 0


class DiffResult(StageResult):
    """`grade_id`: the verdict on an empty patch of an admitted task, which needs no grading box."""

    patch_id: int
    num_bytes: int
    grade_id: int | None = None


class GradeResult(StageResult):
    grade_id: int
    solved: bool
    rejected: bool = False


class FinaliseInput(Payload):
    """What the workflow knows at the end; `grade_id` None means that no verdict exists and `failure` says why.

    `used_seconds` by stage, over all its tries; a rollout that went on from a stored patch knows its later stages only.
    """

    rollout_id: int
    attempt: int
    grade_id: int | None = None
    failure: Literal["infra_failed", "grader_failed", "cancelled"] | None = None
    reason: str = ""
    used_seconds: dict[str, float] = {}


class GroupInput(Payload):
    group_id: int


class GroupPlan(Payload):
    """A group's open members and its rule. `members` are (rollout_id, workflow_id) pairs."""

    group_id: int
    run_id: str
    task: str
    harness: str
    step: int
    members: list[tuple[int, str]]
    stages: dict[str, StageOptions]
    summary: str


class MemberInput(Payload):
    """A group's member that ended without a reward. `elsewhere`: a workflow that is not this group's child has its id."""

    rollout_id: int
    elsewhere: bool = False


class Replacement(Payload):
    """(rollout_id, workflow_id) of the new member, None where there is none. `running`: the old one has not ended, look again later."""

    member: tuple[int, str] | None = None
    running: bool = False


class GroupResult(Payload):
    group_id: int
    state: GroupState
    num_graded: int


class TrainRunInput(Payload):
    """Either a whole `config`, or the path of a YAML file as the worker sees it, or (a restart) an existing `run_id`.

    `resume` is set by continue-as-new only.
    """

    config: dict[str, Any] | None = None
    config_path: str | None = None
    run_id: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(value is not None for value in (self.config, self.config_path, self.run_id)) != 1:
            raise ValueError("give exactly one of config, config_path and run_id")
        return self


class PrepareRunInput(Payload):
    """`workflow_id` `run/<run_id>` names the run."""

    input: TrainRunInput
    run_id: str


class EvaluationPlan(Payload):
    """One evaluation: one policy version, one temperature."""

    label: str
    step: int
    temperature: float
    num_samples: int


class RunPlan(Payload):
    """What TrainRun decides with, resolved once and recorded in the history."""

    run_id: str
    num_steps: int
    evaluations: list[EvaluationPlan]
    stages: dict[str, StageOptions]
    poll_seconds: float
    steps_per_execution: int
    summary: str


class RunInput(Payload):
    run_id: str


class ViewRunInput(Payload):
    """`make_groups` False: only look."""

    run_id: str
    make_groups: bool = True


class StartedGroup(Payload):
    """A group whose workflow must exist."""

    group_id: int
    workflow_id: str
    task: str
    harness: str
    step: int


class RunView(Payload):
    """The run as Postgres shows it now, read on every wake.

    `step` is trained and published. `open_groups` includes those just made, up to the staleness bound. `plannable`: the next plan row
    can be written, or is there already.
    """

    step: int
    open_groups: list[StartedGroup]
    plannable: bool
    wish: Wish
    evaluations_ended: list[str]


class StepInput(Payload):
    run_id: str
    step: int


class Planned(Payload):
    """`step` None: there is nothing to plan yet."""

    step: int | None


class EngineList(Payload):
    engine_ids: list[int]


class SyncInput(Payload):
    run_id: str
    step: int
    engine_id: int


class EvaluateInput(Payload):
    """One evaluation of one policy version, which must not change before it ends."""

    run_id: str
    evaluation: EvaluationPlan


class StartedMember(Payload):
    rollout_id: int
    workflow_id: str
    task: str


class EvaluateMembers(Payload):
    """The rollouts that have to run, at most `window` at a time."""

    members: list[StartedMember]
    harness: str
    window: int
    stages: dict[str, StageOptions]


class EvaluateResult(Payload):
    """`solve_rate` None: no rollout of it got a verdict."""

    label: str
    num_rollouts: int
    num_graded: int
    solve_rate: float | None


class EndRunInput(Payload):
    run_id: str
    state: RunState
    reason: str = ""


class SweepInput(Payload):
    force: bool = False
    dry_run: bool = False


class SweepResult(Payload):
    """`boxes` says of each box in words why it was ended, or would be."""

    boxes_released: int = 0
    boxes_unknown: int = 0
    sessions_closed: int = 0
    rollouts_ended: int = 0
    boxes: tuple[str, ...] = ()


# ---------------------------------------------------------------- search attributes (registered by `ratchet up`)

SEARCH_ATTRIBUTES: dict[str, str] = {
    "ratchet_run": "Keyword",
    "ratchet_task": "Keyword",
    "ratchet_outcome": "Keyword",
    "ratchet_harness": "Keyword",
    "ratchet_reward": "Double",
    "ratchet_step": "Int",
}


def policy_version(run_id: str, step: int, epoch: int) -> str:
    """`<run_id>/<step>.e<epoch>`: the label of published weights."""
    return f"{run_id}/{step}.e{epoch}"


def policy_step(version: str) -> int:
    """The step in a policy version label; raises ValueError for anything that is not one."""
    run_id, _, tail = version.rpartition("/")
    step, separator, epoch = tail.partition(".e")
    if not run_id or not separator or not epoch.isdigit():
        raise ValueError(f"policy version {version!r} is not <run_id>/<step>.e<epoch>")
    return int(step)


# ---------------------------------------------------------------- admission and regrading


class AdmitInput(Payload):
    """Which tasks of a dataset to examine, and how often each patch is graded.

    `labels` empty: all. `again`: also tasks that the present version of their grader has examined. `after` is set by continue-as-new.
    """

    dataset: str
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"
    repeats: int = 3
    labels: list[str] = []
    limit: int | None = None
    again: bool = False
    window: int = 4
    eval_seconds: float = 600
    workspace_seconds: float = 300
    after: int = -1
    counts: dict[str, int] = {}


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
    failed: list[str] = []
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
    counts: dict[str, int] = {}

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
