"""temporal.yaml as types: queues, limits, timeouts and retries of the workflows.

Why here: numbers of orchestration live in one file of the checkout, apart from what a run is.
Called by: the worker, the CLI and the activity that snapshots stage options into a workflow's history.
"""

import os
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.config_sources import explain_validation
from ratchet.errors import ConfigError
from ratchet.payloads import StageOptions

QUEUES = ("control", "boot", "agent", "grade", "learn")
DEFAULT_PATH = Path(__file__).parent.parent / "temporal.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Queue(_Section):
    slots: int


class Stage(_Section):
    queue: str
    start_to_close: float | None
    heartbeat: float | None
    retry_initial: float
    retry_max: float
    tries: int

    def options(self, start_to_close_seconds: float | None = None) -> StageOptions:
        """`start_to_close_seconds` fills in what temporal.yaml leaves to the run's limits."""
        seconds = self.start_to_close if self.start_to_close is not None else start_to_close_seconds
        assert seconds is not None, "a stage without start_to_close needs the run's limit"
        return StageOptions(
            queue=self.queue,
            start_to_close_seconds=seconds,
            heartbeat_seconds=self.heartbeat,
            retry_initial_seconds=self.retry_initial,
            retry_max_seconds=self.retry_max,
            max_tries=self.tries,
        )


class Stages(_Section):
    boot: Stage
    workspace: Stage
    agent: Stage
    diff: Stage
    grade: Stage
    release: Stage
    record: Stage
    learn: Stage


class RolloutNumbers(_Section):
    box_tries: int
    grade_tries: int
    guard_margin: float
    ttl_margin: float


class TrainRunNumbers(_Section):
    poll: float
    steps_per_execution: int


class SweepNumbers(_Section):
    interval: float
    catchup_window: float
    creating_grace: float
    unknown_grace: float
    max_share: float


class TemporalSettings(_Section):
    address: str
    namespace: str
    retention_days: int
    queues: dict[str, Queue]
    boot_workers: int
    agent_workers: int
    max_cached_workflows: int
    stages: Stages
    rollout: RolloutNumbers
    train_run: TrainRunNumbers
    sweep: SweepNumbers

    def all_stages(self, workspace_seconds: float, eval_seconds: float) -> dict[str, StageOptions]:
        """Every stage's options with the run's limits filled in."""
        derived = {"workspace": workspace_seconds + 60, "grade": workspace_seconds + eval_seconds + 120}
        return {name: getattr(self.stages, name).options(derived.get(name)) for name in Stages.model_fields}


def positive_number(name: str, default: int) -> int:
    """Of an environment variable; raises ConfigError."""
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{name}: {text[:40]!r} is no positive number")
    return int(text)


def load_temporal_settings(path: Path | None = None) -> TemporalSettings:
    """temporal.yaml of the checkout, or the file that RATCHET_TEMPORAL_CONFIG names; SWE_BOOT_CONCURRENCY rules over it. Raises ConfigError."""
    path = path or Path(os.environ.get("RATCHET_TEMPORAL_CONFIG") or DEFAULT_PATH)
    try:
        settings = TemporalSettings.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise explain_validation(error, str(path)) from None
    boots = positive_number("SWE_BOOT_CONCURRENCY", 0)
    if boots and "boot" in settings.queues:
        settings = settings.model_copy(update={"queues": {**settings.queues, "boot": Queue(slots=boots)}})
    missing = [queue for queue in QUEUES if queue not in settings.queues]
    if missing or len(settings.queues) != len(QUEUES):
        raise ConfigError(f"{path}: queues must be exactly {', '.join(QUEUES)}")
    return settings
