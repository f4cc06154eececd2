"""What crosses Temporal: arguments and results of workflows and activities, as they stand in histories.

Why here: ids cross, data does not; a field that is added needs a default, for old histories are replayed with new code.
Called by: `workflows/`, `activities/`, and whoever starts a workflow.
"""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ratchet.types import AgentExit, GroupState, Outcome, RunState, SandboxRole, Wish


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


class LiveSandbox(Payload):
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
    """Either a whole `config`, or the path of a YAML file as the worker sees it, or (a restart, a continue-as-new) an existing `run_id`."""

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
