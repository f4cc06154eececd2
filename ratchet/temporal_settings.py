"""temporal.yaml as types: queues, limits, timeouts and retries of the workflows.

The numbers of the orchestration are in one file of the checkout, apart from a run's config. Durations are in seconds.
An activity copies the options of the stages into each workflow's history, so that a replay uses the same numbers.
"""

import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.config_sources import explain_validation
from ratchet.errors import ConfigError
from ratchet.payloads import StageOptions
from ratchet.yaml_text import read_yaml

_MAX_DIGITS = 20
_INSTALLATION = r"[a-z0-9]*"
QUEUES = ("control", "boot", "agent", "grade", "learn", "image")
QUEUES_VARIABLE = "RATCHET_WORKER_QUEUES"
"""Names the queues of a worker without `--queue`, separated by commas."""
DEFAULT_PATH = Path(__file__).parent.parent / "temporal.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Queue(_Section):
    """One task queue."""

    slots: int
    """Number of activities that one worker process of this queue runs at once."""


class Stage(_Section):
    """Timeouts and retries of one stage."""

    queue: str
    """Name of the task queue that the stage's activity runs on."""
    start_to_close: float | None
    """Longest duration of one try, in seconds. Null means that it is derived from the run's own limits."""
    heartbeat: float | None
    """Time in seconds without a heartbeat after which a try counts as lost. Null means that the stage sends none."""
    retry_initial: float
    """Delay before the first retry, in seconds; it doubles with every further retry."""
    retry_max: float
    """Longest delay between two retries, in seconds."""
    tries: int
    """Largest number of tries; 0 means unlimited retries. A stage that must run once per box has 1, and the workflow
    boots a new box."""


class Stages(_Section):
    """The stages of a rollout and of a training step."""

    boot: Stage
    """Creates a box."""
    workspace: Stage
    """Prepares the repository in the agent's box. Null start_to_close: limits.workspace_seconds + 60 s."""
    agent: Stage
    """Runs the agent's program."""
    diff: Stage
    """Ends the agent and takes its diff."""
    grade: Stage
    """Applies the patch and runs the tests. Null start_to_close: workspace_seconds + eval_seconds + 120 s."""
    release: Stage
    """Kills the boxes of a rollout."""
    record: Stage
    """Writes to Postgres only: finalise, plans, group book-keeping."""
    learn: Stage
    """Waits for the learner, and brings engines to new weights."""


class RolloutNumbers(_Section):
    """Limits of one rollout."""

    box_tries: int
    """Number of agent boxes after which a rollout ends as `infra_failed`."""
    grade_tries: int
    """Number of grading boxes after which a rollout ends as `grader_failed`."""
    guard_margin: float
    """Seconds added to agent_seconds + eval_seconds for the guard, unless limits.guard_seconds is set."""
    ttl_margin: float
    """Seconds added to the guard for a box's time to live, up to the provider's maximum."""


class TrainRunNumbers(_Section):
    """Numbers of the TrainRun workflow."""

    poll: float
    """Seconds after which TrainRun reads Postgres although no signal has come."""
    steps_per_execution: int
    """Number of steps after which TrainRun continues as new, which bounds its history."""
    hold_back_below_free: float = 0.05
    """Share of free space on the state directory's disk below which no new groups are started."""
    pause_below_free: float = 0.02
    """Share of free space on the state directory's disk below which runs are paused."""
    enough_free_gb: float = 50
    """Free space in GB from which on neither share counts, because the disk is large."""


class SweepNumbers(_Section):
    """Numbers of the sweep, which releases boxes that no running workflow owns."""

    interval: float
    """Seconds between two sweeps."""
    catchup_window: float
    """Seconds within which a sweep that was missed during an outage is made up for."""
    creating_grace: float
    """Seconds after which a ledger row in state `creating` without a live workflow is released."""
    unknown_grace: float
    """Age in seconds from which a box of this installation that the ledger does not hold is killed."""
    max_share: float
    """Largest share of the live boxes that one sweep may kill without being asked for, unless it is forced."""
    index_seconds: float = 10.0
    """Seconds in each sweep for indexing the words of ended rollouts for the search; 0: none are indexed."""


class PostgresNumbers(_Section):
    """Connections to Postgres. `ratchet up` compares the sum over all parts with what the server allows."""

    worker_pool_size: int = Field(default=10, ge=1)
    """Connections that one worker process keeps, and as many again under load."""
    adapter_pool_size: int = Field(default=10, ge=1)
    """Connections that one adapter process keeps, and as many again under load."""
    max_connections: int = Field(default=200, ge=20)
    """`max_connections` of the embedded server, which takes it at its next start."""


class AdapterNumbers(_Section):
    """Numbers of one adapter process."""

    max_sessions: int = Field(default=2000, ge=1)
    """Number of sessions, one per running agent, that the process keeps in memory. It reads others from the store again
    at their next call, which costs time and no correctness."""


class Retention(_Section):
    """Retention of the data that a run leaves behind; by default it is kept until `ratchet admin prune RUN`. Nothing of
    a run that is open or can be resumed is deleted, unless `ratchet admin prune RUN --force` names it.
    `activities/pruning.py` lists the data that stays."""

    turns_days: float | None = None
    """Days after the end of a done run from which its turns and logs are moved from Postgres to Parquet files in
    `archive` of the state directory. Null keeps them in Postgres."""
    weights_days: float | None = None
    """Days after the end of a done run from which its checkpoints and published weights are deleted, except the newest
    ones and the initial weights. Null keeps them, and so does `training.kept_versions: null` in the run's config."""
    seconds_per_sweep: float = 60
    """Time for which one sweep moves turns, in seconds; the next sweep goes on."""


class TemporalSettings(_Section):
    """The whole of temporal.yaml."""

    address: str
    """host:port of the Temporal server; TEMPORAL_ADDRESS overrides it."""
    namespace: str
    """Temporal namespace; TEMPORAL_NAMESPACE overrides it."""
    installation: str = Field(default="", pattern=f"^{_INSTALLATION}$")
    """Prefix of this installation's task queues, run ids and workflow ids, so that several installations can share a
    namespace; RATCHET_INSTALLATION overrides it. Empty, the default, suits a namespace of its own. It must not change
    while workflows are open."""
    worker_versioning: bool = False
    """Let Temporal route tasks by the workers' version. By default it does not: any worker gets any task, and versions
    may run side by side. With it, a version gets work once `ratchet up` or an administrator has made it current, so
    that it can be started beside the old one, and taken back; without a worker of the current version everything waits.
    """
    retention_days: int
    """Days for which Temporal keeps the histories of closed workflows."""
    queues: dict[str, Queue]
    """Task queues by name: exactly control, boot, agent, grade, learn and image."""
    boot_workers: int
    """Number of worker processes of the boot queue, by which its slots are divided."""
    agent_workers: int
    """Number of worker processes of the agent queue; sandbox.max_boxes must not exceed their slots together."""
    max_cached_workflows: int
    """Number of workflows that a worker keeps in memory; others are replayed from their history when they wake."""
    stages: Stages
    """Timeouts and retries by stage."""
    image_build: Stage
    """Builds the image of a task that comes with a Dockerfile."""
    rollout: RolloutNumbers
    """Limits of one rollout."""
    train_run: TrainRunNumbers
    """Numbers of the TrainRun workflow."""
    sweep: SweepNumbers
    """Numbers of the sweep."""
    postgres: PostgresNumbers = PostgresNumbers()
    """Connections to Postgres."""
    adapter: AdapterNumbers = AdapterNumbers()
    """Numbers of one adapter process."""
    retention: Retention = Retention()
    """Retention of turns and weights."""

    def all_stages(self, workspace_seconds: float, eval_seconds: float) -> dict[str, StageOptions]:
        """Return the options of every stage, with the run's limits filled in."""
        derived = {"workspace": workspace_seconds + 60, "grade": workspace_seconds + eval_seconds + 120}
        return {name: self.stage_options(name, derived.get(name)) for name in Stages.model_fields}

    def stage_options(self, name: str, start_to_close_seconds: float | None = None) -> StageOptions:
        """Return the options of one stage for the SDK. `start_to_close_seconds` replaces a null `start_to_close`."""
        return self._options(getattr(self.stages, name), start_to_close_seconds)

    def image_options(self) -> StageOptions:
        return self._options(self.image_build)

    def _options(self, stage: Stage, start_to_close_seconds: float | None = None) -> StageOptions:
        seconds = stage.start_to_close if stage.start_to_close is not None else start_to_close_seconds
        assert seconds is not None, "a stage without start_to_close needs the run's limit"
        return StageOptions(
            queue=self.own(stage.queue),
            start_to_close_seconds=seconds,
            heartbeat_seconds=stage.heartbeat,
            retry_initial_seconds=stage.retry_initial,
            retry_max_seconds=stage.retry_max,
            max_tries=stage.tries,
        )

    def own(self, name: str) -> str:
        """Return the name of a task queue, run, workflow or schedule of this installation."""
        return f"{self.installation}-{name}" if self.installation else name


def positive_number(name: str, default: int) -> int:
    """Return the value of an environment variable, or `default` if unset. Raises ConfigError for any other text."""
    text = os.environ.get(name)
    if not text:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not 0 < int(text) <= LARGEST_INTEGER:
        raise ConfigError(f"{name}: {text[:40]!r} is not a positive number up to {LARGEST_INTEGER}")
    return int(text)


def load_temporal_settings(path: Path | None = None) -> TemporalSettings:
    """Read temporal.yaml of the checkout, or the file that RATCHET_TEMPORAL_CONFIG names.

    SWE_BOOT_CONCURRENCY overrides the slots of the boot queue. Raises ConfigError.
    """
    path = path or Path(os.environ.get("RATCHET_TEMPORAL_CONFIG") or DEFAULT_PATH)
    try:
        settings = TemporalSettings.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain_validation(error, str(path), TemporalSettings) from None
    boots = positive_number("SWE_BOOT_CONCURRENCY", 0)
    if boots and "boot" in settings.queues:
        settings = settings.model_copy(update={"queues": {**settings.queues, "boot": Queue(slots=boots)}})
    installation = os.environ.get("RATCHET_INSTALLATION") or settings.installation
    if not re.fullmatch(_INSTALLATION, installation):
        raise ConfigError(f"RATCHET_INSTALLATION: {installation[:40]!r} may have only lower-case letters and digits")
    settings = settings.model_copy(update={"installation": installation})
    missing = [queue for queue in QUEUES if queue not in settings.queues]
    if missing or len(settings.queues) != len(QUEUES):
        raise ConfigError(f"{path}: queues must be exactly {', '.join(QUEUES)}")
    return settings
