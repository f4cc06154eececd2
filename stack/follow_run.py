"""Start a run or find it again, follow it to its end, and read its result and cost from the store.

`ratchet train`, the benchmark of the curve and the end-to-end tests start and follow runs through these functions.
"""

import asyncio
import base64
import contextlib
import secrets
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from ratchet.config import RunConfig
from ratchet.config_sections import DEFAULT_BIN_TOKENS
from ratchet.errors import ConfigError, StoreUnavailableError
from ratchet.payloads import TrainRunInput
from ratchet.progress import CountedLine, ReportProgress
from ratchet.run_names import RUN_ID
from ratchet.temporal_client import pending_activities, root_cause, start_train_run, starting
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import Purpose, RunState
from ratchet.vime_names import value_of
from reads.evaluations import evaluation_rates
from reads.run_result import evaluation_rewards, read_steps, run_progress
from reads.time_left import read_seconds_left, rollouts_of_run
from sandboxes.registry import sandbox_provider
from stack.cpu_meter import CpuMeter
from stack.curve import summary
from stack.part_health import HealthState, read_health
from stack.parts import Stack
from stack.startup import START_SECONDS, connect_stack, keep_served, require_up
from store import open_runs, runs
from training.rollout_dumps import wait_for_dumps

_ACCEPT_SECONDS = 60.0
_ACCEPT_LOOK_SECONDS = 0.3
_LOOK_SECONDS = 2.0
_LOOK_SHARE = 20.0
"""A look at a large run is followed by a pause of so many times its own duration."""
_REPORT_SECONDS = 10.0
_PROBLEM_SECONDS = 15.0


async def start_run(
    stack: Stack, config: RunConfig, name: str, new: bool, say: ReportProgress, run_id: str | None = None
) -> str:
    """Return the newest unfinished run with the same config, resumed if it was paused, or a new run that has its row in
    the store. `run_id`: of a new run; if it is being started already, its row is waited for.

    Raises ConfigError if another run of its engine set is open, or with the reason for which the new run is refused.
    """
    if not stack.has_gateway:
        for sentence in sandbox_provider().capabilities.without:
            say(f"these boxes do without: {sentence}")
    settings = load_temporal_settings()
    client = await connect_stack(stack, settings, START_SECONDS)  # before anything is changed
    if config.training.bin_tokens > DEFAULT_BIN_TOKENS:
        say(f"training.bin_tokens is {config.training.bin_tokens}; `--check` estimates the learner's memory")
    async with stack.database() as database, database.begin() as connection:
        unfinished = None if new else await runs.newest_unfinished_run(connection, config)
        reason = await open_runs.resume_run(connection, unfinished) if unfinished is not None else None
        stopped = await runs.newest_stopped_run(connection, config)
        if unfinished is None:
            await open_runs.require_slot(connection, "", config)
    if unfinished is not None:
        say(f"continuing run {unfinished} (same config)" + (f"; it was paused: {reason}" if reason else ""))
        with starting(f"run/{unfinished}"):
            await start_train_run(client, settings, unfinished)
        await asyncio.to_thread(keep_served, stack, config, say)
        return unfinished
    if stopped is not None and not new:
        say(f"run {stopped} has the same config and was stopped early; `ratchet resume {stopped}` would continue it")
    run_id = run_id or new_run_id(settings.own(name))
    argument = TrainRunInput(config=config.model_dump(mode="json"))
    queue = settings.own("control")
    same = WorkflowIDConflictPolicy.USE_EXISTING
    with starting(f"run/{run_id}"):
        handle = await client.start_workflow(
            "TrainRun", argument, id=f"run/{run_id}", task_queue=queue, id_conflict_policy=same
        )
    say(f"run {run_id} is started; from now on it goes on without this command")
    if await _is_accepted(stack, client, handle, run_id, say):
        await asyncio.to_thread(keep_served, stack, config, say)
    return run_id


async def _is_accepted(
    stack: Stack, client: Client, handle: WorkflowHandle[Any, Any], run_id: str, say: ReportProgress
) -> bool:
    """Wait until the run has its row, for at most a minute, because weights of many GB are read before. Return whether
    it has one.

    Raises ConfigError if its workflow fails before, which nothing in the store would show.
    """
    result = asyncio.create_task(handle.result())
    deadline = time.monotonic() + _ACCEPT_SECONDS
    try:
        async with stack.database() as database:
            while time.monotonic() < deadline:
                await asyncio.wait([result], timeout=_ACCEPT_LOOK_SECONDS)
                with contextlib.suppress(StoreUnavailableError):
                    if await database.run(runs.get_run, run_id) is not None:
                        return True
                if result.done():
                    await result
                    return True
        say(f"run {run_id} is not accepted yet: {await _why_not_accepted(client, handle.id)}")
    except RPCError as error:
        say(f"whether run {run_id} is accepted is not known, because Temporal does not answer: {error.message}")
    except WorkflowFailureError as error:
        raise ConfigError(f"run {run_id} is refused: {root_cause(error)}") from None
    finally:
        result.cancel()
        await asyncio.gather(result, return_exceptions=True)  # else a failure that comes now is printed as unretrieved
    return False


async def _why_not_accepted(client: Client, workflow_id: str) -> str:
    """Say what a run without a row waits for. Raises RPCError."""
    for pending in await pending_activities(client, workflow_id) or []:
        if pending.error:
            return f"try {pending.attempt - 1} of its preparation failed: {pending.error}"
    return "its weights are read, or no worker runs (`ratchet status`)"


def run_name(config: Path) -> str:
    """Return the first part of the ids of runs of this config file: EXP_TAG, or the file's name."""
    return value_of("EXP_TAG") or config.stem


def new_run_id(name: str) -> str:
    """Return an id that no run has: name, STAMP or the day, and four random characters. Raises ConfigError."""
    suffix = base64.b32encode(secrets.token_bytes(5)).decode().lower()[:4]
    run_id = f"{name}-{value_of('STAMP') or f'{datetime.now(UTC):%y%m%d}'}-{suffix}"
    if not RUN_ID.fullmatch(run_id):
        raise ConfigError(
            f"{run_id!r} cannot be the id of a run: use letters, digits, `.`, `_` and `-` in the config file's name, "
            "EXP_TAG and STAMP"
        )
    return run_id


@dataclass(slots=True, frozen=True)
class Cost:
    """Resources seen in use while `num_rollouts` ended; a process that began to watch late has not seen all."""

    num_rollouts: int
    seconds: float
    cpu_seconds: dict[str, float]


async def watch_run(stack: Stack, run_id: str, say: ReportProgress) -> Cost:
    """Report progress until the run has ended. Raises ConfigError if it failed or pauses, MachineError if down."""
    client = await connect_stack(stack, load_temporal_settings(), START_SECONDS)
    handle = client.get_workflow_handle(f"run/{run_id}")
    result = asyncio.create_task(handle.result())
    progress = _Progress(stack, run_id, say)
    meter, begun = CpuMeter(stack), time.monotonic()
    try:
        while True:
            ended, _ = await asyncio.wait([result], timeout=max(_LOOK_SECONDS, _LOOK_SHARE * progress.report_seconds))
            await asyncio.to_thread(meter.sample)
            await progress.report()
            if ended and isinstance(error := result.exception(), RPCError):
                if error.status == RPCStatusCode.NOT_FOUND:
                    raise ConfigError(
                        f"Temporal has no workflow run/{run_id}; "
                        "if its state was lost, `ratchet up` starts the workflow again"
                    )
                # Temporal does not answer. The supervisor restarts it, except after `ratchet down`.
                await require_up(stack, f"run {run_id} continues")
                await asyncio.sleep(_LOOK_SECONDS)
                result = asyncio.create_task(handle.result())
            elif ended:
                await result
                return Cost(progress.num_ended, time.monotonic() - begun, dict(meter.used))
    except WorkflowFailureError as error:
        raise ConfigError(f"run {run_id} failed: {root_cause(error)}") from None
    finally:
        result.cancel()
        await progress.database.close()


class _Progress:
    """Report the run's progress from Postgres when it changes: steps and evaluations at once, counts at intervals."""

    def __init__(self, stack: Stack, run_id: str, say: ReportProgress) -> None:
        self.stack = stack
        self.run_id = run_id
        self.report_line = say
        self.database = stack.database()
        self.line = ""
        self.begun = time.monotonic()
        self.num_ended = 0
        self.reported_at = 0.0
        self.report_seconds = 0.0
        self.milestone: tuple[int, list[str]] | None = None
        self.num_ended_before: int | None = None
        self.problems: dict[str, tuple[HealthState, int]] = {}
        self.reason = ""

    def report_parts(self) -> None:
        """Report each part that has not answered for a while, once per state and restart, and that it answers again."""
        for name, part in read_health(self.stack.home).items():
            words, key = part.summary(time.time()), (part.state, part.restarts)
            if words and time.time() - part.since > _PROBLEM_SECONDS and self.problems.get(name) != key:
                self.problems[name] = key
                self.report_line(f"{name}: {words}")
            elif not words and self.problems.pop(name, None) is not None:
                self.report_line(f"{name} answers again")

    async def report(self) -> None:
        self.report_parts()
        started = time.monotonic()
        try:
            async with self.database.begin() as connection:
                row = await runs.get_run(connection, self.run_id)
                if row is None:
                    return
                rates, config = await evaluation_rates(connection, self.run_id), row.resolved_config
                found = await run_progress(connection, self.run_id, rates)
                num_held_out = await runs.count_run_tasks(connection, self.run_id, Purpose.EVAL)
                pace = 60 * self.num_ended / (started - self.begun)
                left = await read_seconds_left(connection, self.run_id, config, found["step"], rates, pace)
        except StoreUnavailableError:
            return
        self.report_seconds = time.monotonic() - started
        if row.state == RunState.PAUSED:
            raise ConfigError(f"run {self.run_id} is paused: {row.state_reason}. The same command resumes it")
        if row.state_reason and row.state_reason != self.reason:
            self.report_line(row.state_reason)
        self.reason = row.state_reason
        if self.num_ended_before is None:
            self.num_ended_before = found["ended"]
        self.num_ended = found["ended"] - self.num_ended_before
        milestone = (found["step"], list(found["evaluations"]))
        total = max(rollouts_of_run(config, num_held_out), found["rollouts"])
        line = _line(found, config.training.steps, total)
        is_step = milestone != self.milestone  # such a line stays on a terminal's screen
        if is_step or (line != self.line and time.monotonic() - self.reported_at >= _REPORT_SECONDS):
            self.report_line(line if is_step else CountedLine(line, "rollouts", found["ended"], total, left))
            self.line = line
            self.milestone = milestone
            self.reported_at = time.monotonic()


def _line(progress: dict[str, Any], num_steps: int, total: int) -> str:
    parts = [f"step {progress['step']} of {num_steps}", f"{progress['ended']} of {total} rollouts"]
    if progress["failed"]:
        parts.append(f"{progress['failed']} failed")
    if progress["reward"] is not None:
        parts.append(f"reward {progress['reward']:.2f}")
    rewards = {label: reward for label, reward in progress["evaluations"].items() if reward is not None}
    return "; ".join([", ".join(parts), *(f"{label} {reward:.2f}" for label, reward in rewards.items())])


async def follow_to_end(stack: Stack, run_id: str, say: ReportProgress) -> dict[str, Any]:
    """Report progress until the run has ended and its dumps are written; return its result and cost."""
    cost = await watch_run(stack, run_id, say)
    await wait_for_dumps(run_id, say)
    return await collect_result(stack, run_id) | {"cost": asdict(cost)}


async def collect_result(stack: Stack, run_id: str) -> dict[str, Any]:
    """Read steps, evaluations and their summary from Postgres."""
    async with stack.database() as database, database.begin() as connection:
        progress = await run_progress(connection, run_id, await evaluation_rates(connection, run_id))
        steps = await read_steps(connection, run_id)
        rewards = await evaluation_rewards(connection, run_id)
    return {"run_id": run_id, **progress, "steps": steps, "summary": summary(rewards) if rewards else None}
