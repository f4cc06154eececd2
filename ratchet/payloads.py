"""Arguments and results of workflows and activities, as they are stored in histories.

They carry ids, not data. Workers of two versions may run side by side during an upgrade, and recorded histories are
replayed with new code. So a new field needs a default, and an unknown field is ignored, except in what people start;
there it is a typing mistake. Named tuples are JSON arrays in a history; they cannot grow.
"""

from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ratchet.bounded_numbers import RowId
from ratchet.types import AgentExit, GroupState, JsonObject, Outcome, RunState, SandboxRole, Suspicion, Wish


class Payload(BaseModel):
    """Base of all arguments and results: immutable, unknown fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StartInput(Payload):
    """Base of the arguments of workflows that people start: unknown fields are refused.

    A null in an unknown field is ignored: a newer version sends its new fields so when it starts a child workflow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key in cls.model_fields}


class StageOptions(Payload):
    """Time limits and retries of one stage, resolved from temporal.yaml and recorded in the history.

    `heartbeat_seconds` None: the stage sends no heartbeats. `max_tries` 0: unlimited.
    """

    queue: str
    start_to_close_seconds: float
    heartbeat_seconds: float | None = None
    retry_initial_seconds: float = 1.0
    retry_max_seconds: float = 30.0
    max_tries: int = 0


class RolloutInput(StartInput):
    """Argument of the Rollout workflow.

    Either `rollout_id` of an existing row, as groups start it, or a dataset and a task, as `temporal workflow start`
    and `ratchet tasks run` do; the rollout then belongs to a run `adhoc-…`. `task` is the row's label or its number
    (from 0) in the dataset. `config`: a whole run config, whose values `dataset`, `model` and `harness` override.
    `model` and `policy_version`: the rollout is refused if the engines serve another one."""

    rollout_id: RowId | None = None
    dataset: str | None = None
    task: str | int | None = None
    policy_version: str | None = None
    model: str | None = None
    harness: str | None = None
    config: JsonObject | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.rollout_id is None and (self.dataset is None or self.task is None):
            raise ValueError("give dataset and task (a label, or a row number from 0), or rollout_id")
        return self


class RolloutResult(Payload):
    """The end of a rollout. `reward` is None unless the outcome is graded or rejected."""

    rollout_id: int
    outcome: Outcome
    reward: float | None
    agent_exit: AgentExit | None = None


class Claim(Payload):
    """A rollout that a workflow run has claimed: what remains to be done, and the limits.

    `attempt` counts agent boxes from 1. `patch_id`: an earlier workflow run has stored a patch, so only grading
    remains. `has_generate`: a function of the user's own takes the place of the stages from workspace to grade."""

    rollout_id: int
    outcome: Outcome | None = None
    reward: float | None = None
    attempt: int
    patch_id: int | None = None
    box_tries: int
    grade_tries: int
    stages: dict[str, StageOptions]
    summary: str
    has_generate: bool = False


class RolloutRow(Payload):
    """The row that `prepare_rollout` created for a rollout that was started by dataset and task.

    `run_id`, `task` (its label) and `harness` become search attributes."""

    rollout_id: int
    run_id: str
    task: str
    harness: str


class StageInput(Payload):
    """Argument of every stage that uses a box. `grader` None: the task's own. `repeat` counts grades of one patch.
    `grade_id`: the solved grade that a control run checks; `control_number` counts its control runs from 0.
    `suspected`: what earlier boxes showed of the patch; this box's word is final on these.
    `ended_by_host`: the worker's machine ended the try of the boxes that are released. `datasets`: as of a regrade."""

    rollout_id: int
    attempt: int
    sandbox_id: int | None = None
    patch_id: int | None = None
    role: SandboxRole = SandboxRole.AGENT
    grader: str | None = None
    repeat: int = 0
    grade_id: int | None = None
    control_number: int = 0
    suspected: list[Suspicion] = []
    ended_by_host: bool = False
    datasets: list[str] = []


class StageResult(Payload):
    """`used_seconds`: how long the stage worked, for reports; the agent stage measures it by the box's clock."""

    used_seconds: float = 0.0


class LiveSandbox(StageResult):
    """A live row of the sandbox ledger."""

    sandbox_id: int
    provider_id: str


class AgentResult(StageResult):
    """The end of the agent's program. `num_turns`: completed model calls. `reason`: why the agent is starved, if a
    better reason is known than that it could not reach its model. `is_final`: another box would end in the same way.
    `waited_seconds`: time for an engine or the adapter, which the agent's budget does not count."""

    agent_exit: AgentExit
    num_turns: int = 0
    reason: str = ""
    is_final: bool = False
    waited_seconds: float = 0.0


class GradeResult(StageResult):
    """The stored verdict. `num_control_runs`: how many control runs, each in another box, have to confirm it.

    `reason`: why, for people who look at the workflow.
    """

    grade_id: int
    solved: bool
    rejected: bool = False
    reason: str = ""
    num_control_runs: int = 0


class DiffResult(StageResult):
    """The stored patch. `grade_id`: set if the patch is empty and known to solve nothing, so no grading box is
    needed. `grade`, `reason`: the verdict that a user's own function has had, and what of its samples is not trained.
    """

    patch_id: int
    num_bytes: int
    grade_id: int | None = None
    grade: GradeResult | None = None
    reason: str = ""


class FinaliseInput(Payload):
    """The end of a rollout in its workflow. `grade_id` None: there is no verdict, and `failure` is the outcome.

    `used_seconds` by stage, summed over its tries. From a stored patch on, it lacks the stages before.
    """

    rollout_id: int
    attempt: int
    grade_id: int | None = None
    failure: Literal["infra_failed", "grader_failed", "cancelled"] | None = None
    reason: str = ""
    used_seconds: dict[str, float] = {}


class GroupInput(Payload):
    """Argument of the RolloutGroup workflow and of its activities."""

    group_id: int


class GroupMember(NamedTuple):
    """A member of a group and the id of its workflow."""

    rollout_id: int
    workflow_id: str


class GroupPlan(Payload):
    """The members of a group that have no reward and no replacement yet."""

    group_id: int
    run_id: str
    task: str
    harness: str
    step: int
    members: list[GroupMember]
    stages: dict[str, StageOptions]
    summary: str


class MemberInput(Payload):
    """A member that ended without a reward. `elsewhere`: a workflow with its id runs and is not a child of this one."""

    rollout_id: int
    elsewhere: bool = False


class Replacement(Payload):
    """The new member, None if the store grants none. `running`: the old one has not ended yet, so ask again later."""

    member: GroupMember | None = None
    running: bool = False


class GroupResult(Payload):
    """State of a group after its members have ended, and how many of them have a reward."""

    group_id: int
    state: GroupState
    num_graded: int


class TrainRunInput(StartInput):
    """Exactly one of: a whole `config`, the path of a YAML file on the worker's machine, an existing `run_id`."""

    config: JsonObject | None = None
    config_path: str | None = None
    run_id: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(value is not None for value in (self.config, self.config_path, self.run_id)) != 1:
            raise ValueError("give exactly one of config, config_path and run_id")
        return self


class PrepareRunInput(Payload):
    """`run_id` is taken from the workflow's id, `run/<run_id>`."""

    input: TrainRunInput
    run_id: str


class EvaluationPlan(Payload):
    """One evaluation of the policy of one step at one temperature."""

    label: str
    step: int
    temperature: float
    num_samples: int


class RunPlan(Payload):
    """The numbers that TrainRun needs, resolved once and recorded in the history."""

    run_id: str
    stages: dict[str, StageOptions]
    poll_seconds: float
    steps_per_execution: int
    summary: str


class RunInput(Payload):
    """Argument of activities that need only the run."""

    run_id: str


class ViewRunInput(Payload):
    """`make_groups` False: start no new groups; for a run that is being stopped."""

    run_id: str
    make_groups: bool = True


class StartedGroup(Payload):
    """An open group, whose workflow must run."""

    group_id: int
    workflow_id: str
    task: str
    harness: str
    step: int


class RunningGroups(Payload):
    """The workflows of a run's open groups that run now."""

    workflow_ids: list[str]


class RunView(Payload):
    """The state of a run in Postgres, read each time that TrainRun wakes.

    `step`: the newest published one. `open_groups` includes the groups that were just made. `plannable`: the next plan
    row can be written, or exists already. `reason`: why the run is paused, or why it starts no new groups.
    `last_step`: the step after which the run ends, of `num_steps` in its config. `evaluations`: those of the newest
    step. `situation`: what is in flight, for people. `batch_reward_mean`: of the newest step's batch.
    """

    step: int
    open_groups: list[StartedGroup]
    plannable: bool
    wish: Wish
    evaluations_begun: list[str] = []
    evaluations_ended: list[str]
    state: RunState
    reason: str = ""
    last_step: int
    num_steps: int
    evaluations: list[EvaluationPlan]
    situation: str = ""
    batch_reward_mean: float | None = None


class PauseRunInput(Payload):
    """Pause a run for a reason, as one sentence."""

    run_id: str
    reason: str


class StepInput(Payload):
    run_id: str
    step: int


class LearnedStep(StageResult):
    """`trained` False: the run was stopped before the step was trained."""

    trained: bool = True


class Planned(Payload):
    """The step that was planned; None if too few groups are ready, or the run is not running."""

    step: int | None


class EngineList(Payload):
    """Engines that must receive new weights."""

    engine_ids: list[int]


class SyncInput(Payload):
    """Bring one engine to the weights of one step."""

    run_id: str
    step: int
    engine_id: int


class EndRunInput(Payload):
    """The final state of a run and the reason for it. `last_step`: see `RunView`, for a run that ends by itself."""

    run_id: str
    state: RunState
    reason: str = ""
    last_step: int | None = None


class RunEnded(StageResult):
    """`ended` False: the run goes on, because it was extended or resumed after its end had been decided."""

    ended: bool
