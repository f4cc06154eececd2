"""Write what a person asks of a run: its state, its wish or its config, and the audit row, in one transaction.

Each function holds the lock of the run's row, which planning takes too, so `from_step` of the audit row is exact: plan
rows up to the one before were written without the change, and all later ones are written with it. A request whose id
is known, or that asks for what is so already, changes nothing. `ratchet.steering` says who reads what when.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.steering import acts_on, changed_config, config_value, with_values
from ratchet.stored_config import read_stored_config
from ratchet.types import OPEN_STATES, GroupState, RunState, SteeringAction, Wish
from store import open_runs, plans, runs
from store.columns import columns_of
from store.runs import ADHOC, RunRow
from store.schema import BatchItemTable, BatchTable, MetricTable, RolloutGroupTable, RunTable, SteeringTable


@dataclass(slots=True, frozen=True)
class Request:
    """The author and the reason of a change. `request_id`: the same for a repetition of the same request."""

    run_id: str
    request_id: str
    asked_by: str
    reason: str = ""


@dataclass(slots=True, frozen=True)
class SteeringAnswer:
    """The effect of a request, as one sentence. `changed`: False if there was none."""

    text: str
    changed: bool = True


@dataclass(slots=True, frozen=True)
class _LockedRun(RunRow):
    """The run's row under its lock. `next_step`: the first step that is not planned."""

    next_step: int = 0

    @property
    def steps(self) -> int:
        return read_stored_config(self.config).training.steps


async def _lock(connection: AsyncConnection, run_id: str, with_rollouts: bool = True) -> _LockedRun:
    """Lock the run's row. Raises ConfigError if there is no such run, or none that makes rollouts if that is needed."""
    statement = select(*columns_of(RunRow, RunTable)).where(RunTable.run_id == run_id)
    row = (await connection.execute(statement.with_for_update(key_share=True))).one_or_none()
    if row is None or row.config_name == ADHOC:
        raise ConfigError(f"there is no training run {run_id!r}; `ratchet show runs` lists those that there are")
    if with_rollouts and row.source_run_id is not None:
        raise ConfigError(
            f"run {run_id} trains on stored rollouts: its plan rows are written, so it can only be paused"
        )
    next_step = await plans.newest_planned_step(connection, run_id) + 1
    return replace(_LockedRun(*row), next_step=next_step)


def _require_open(run: _LockedRun, verb: str) -> None:
    if run.state not in OPEN_STATES:
        raise ConfigError(f"run {run.run_id} has ended ({run.state}), so it cannot be {verb}")


async def is_known(connection: AsyncConnection, request: Request) -> bool:
    """Return whether this request, or an earlier copy of it, has been recorded."""
    statement = select(SteeringTable.id).where(
        SteeringTable.run_id == request.run_id, SteeringTable.request_id == request.request_id
    )
    return (await connection.execute(statement.limit(1))).one_or_none() is not None


async def record(
    connection: AsyncConnection,
    request: Request,
    action: SteeringAction,
    target: str,
    before: Any,
    after: Any,
    from_step: int,
) -> None:
    """Write one audit row; a repeated request keeps its first one."""
    values = {"action": action, "target": target, "before": before, "after": after, "from_step": from_step}
    await connection.execute(insert(SteeringTable).values(**asdict(request), **values).on_conflict_do_nothing())


async def record_pause(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """Pause a running run. Nothing new starts; rollouts and the learner's step in progress go on to their end."""
    run = await _lock(connection, request.run_id, with_rollouts=False)
    _require_open(run, "paused")
    if run.state == RunState.PAUSED:
        return SteeringAnswer(f"run {run.run_id} is paused already: {run.state_reason}", changed=False)
    if await is_known(connection, request):
        return SteeringAnswer(f"run {run.run_id} was paused by this request, and has been resumed since", changed=False)
    reason = f"paused by {request.asked_by}" + (f": {request.reason}" if request.reason else "")
    await open_runs.pause_run(connection, run.run_id, reason)
    await record(connection, request, SteeringAction.PAUSE, "", run.state, RunState.PAUSED, run.next_step)
    before = "" if run.wish == Wish.NONE else f"; it was to {run.wish}, which `ratchet resume {run.run_id}` takes back"
    return SteeringAnswer(f"run {run.run_id} is paused; what is in flight goes on{before}")


async def record_resume(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """Let a paused, stopped, failed or cancelled run go on, and take back a wish to stop or drain an open one."""
    run = await _lock(connection, request.run_id, with_rollouts=False)
    if await is_known(connection, request):
        return SteeringAnswer(f"run {run.run_id} was resumed by this request", changed=False)
    stopped_because = await open_runs.resume_run(connection, run.run_id)
    ending = run.wish != Wish.NONE or run.stop_at is not None
    if ending:
        going = update(RunTable).where(RunTable.run_id == run.run_id)
        await connection.execute(going.values(wish=Wish.NONE, stop_at=None))
    if stopped_because is None and not ending:
        return SteeringAnswer(f"run {run.run_id} was running already", changed=False)
    before = run.state if stopped_because is not None else run.wish
    await record(connection, request, SteeringAction.RESUME, "", before, RunState.RUNNING, run.next_step)
    why = stopped_because if stopped_because is not None else f"it was about to {run.wish}"
    return SteeringAnswer(f"run {run.run_id} goes on; before: {why}")


async def record_drain(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """Make no new groups of a running run; it ends when those in flight are trained, or will never be."""
    run = await _lock(connection, request.run_id)
    _require_open(run, "drained")
    if await is_known(connection, request):
        words = "is to drain already" if run.wish == Wish.DRAIN else "was drained by this request before"
        return SteeringAnswer(f"run {run.run_id} {words}", changed=False)
    if run.state == RunState.PAUSED:
        raise ConfigError(f"run {run.run_id} is paused, so nothing in flight would be trained: resume it, or stop it")
    if run.wish == Wish.STOP:
        raise ConfigError(
            f"run {run.run_id} is to stop after step {run.stop_at}, which is sooner: `ratchet resume {run.run_id}` "
            "takes that back"
        )
    if run.wish == Wish.DRAIN:
        return SteeringAnswer(f"run {run.run_id} is to drain already", changed=False)
    await connection.execute(update(RunTable).where(RunTable.run_id == run.run_id).values(wish=Wish.DRAIN))
    await record(connection, request, SteeringAction.DRAIN, "", Wish.NONE, Wish.DRAIN, run.next_step)
    at_end = read_stored_config(run.config).evaluation.at
    left_out = f"; the evaluation at its end is left out: `ratchet evaluate {run.run_id}` then makes one"
    return SteeringAnswer(
        f"run {run.run_id} starts no new groups, and ends when those in flight are settled"
        + (left_out if "end" in at_end else "")
    )


async def record_stop(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """End the run after the step that is planned, with a checkpoint; its open groups are cancelled.

    A paused run ends after its newest trained step: what is planned may be what it cannot train. So does one that was
    paused after it was asked to stop, if it is asked again.
    """
    run = await _lock(connection, request.run_id)
    _require_open(run, "stopped")
    is_stuck = run.state == RunState.PAUSED and run.stop_at is not None and run.stop_at > run.step
    if run.wish == Wish.STOP and not is_stuck:
        return SteeringAnswer(f"run {run.run_id} is to stop after step {run.stop_at} already", changed=False)
    if await is_known(connection, request):
        return SteeringAnswer(
            f"run {run.run_id} was stopped by this request, and has been resumed since", changed=False
        )
    last = run.step if run.state == RunState.PAUSED else run.next_step - 1
    going = update(RunTable).where(RunTable.run_id == run.run_id)
    await connection.execute(going.values(wish=Wish.STOP, stop_at=last))
    await record(
        connection, request, SteeringAction.STOP, "", run.wish, {"wish": Wish.STOP, "stop_at": last}, run.next_step
    )
    return SteeringAnswer(f"run {run.run_id} ends after step {last}; `ratchet resume {run.run_id}` lets it go on later")


CHANGES_OF_STATE = {
    SteeringAction.PAUSE: record_pause,
    SteeringAction.RESUME: record_resume,
    SteeringAction.DRAIN: record_drain,
    SteeringAction.STOP: record_stop,
}
"""The requests that need nothing but the run."""


async def end_drained(connection: AsyncConnection, run_id: str) -> None:
    """Let a run that drains end after its newest planned step, because nothing in flight can be trained any more.

    One that was opened for an evaluation only has its last step already (`store.steering_targets`).
    """
    last = select(func.coalesce(func.max(BatchTable.step), 0)).where(BatchTable.run_id == run_id).scalar_subquery()
    draining = update(RunTable).where(
        RunTable.run_id == run_id, RunTable.wish == Wish.DRAIN, RunTable.stop_at.is_(None)
    )
    await connection.execute(draining.values(stop_at=last))


async def record_extension(connection: AsyncConnection, request: Request, num_steps: int) -> SteeringAnswer:
    """Add steps to a run. One that has ended goes on, from its newest checkpoint."""
    run = await _lock(connection, request.run_id)
    if await is_known(connection, request):
        return SteeringAnswer(f"run {run.run_id} has {run.steps} steps; this request has extended it", changed=False)
    if num_steps < 1:
        raise ConfigError(f"extend: expected a number of steps above 0, found {num_steps}")
    if run.state in OPEN_STATES and run.wish != Wish.NONE:
        raise ConfigError(f"run {run.run_id} is to {run.wish}: take that back with `ratchet resume {run.run_id}` first")
    steps = run.steps + num_steps
    config = with_values(run.config, {"training.steps": steps})
    if run.state not in OPEN_STATES:
        await open_runs.resume_run(connection, run.run_id, allow_done=True)
    values = {"config": config.model_dump(mode="json"), "wish": Wish.NONE, "stop_at": None}
    await connection.execute(update(RunTable).where(RunTable.run_id == run.run_id).values(**values))
    await record(connection, request, SteeringAction.EXTEND, "training.steps", run.steps, steps, run.next_step)
    goes_on = "" if run.state in OPEN_STATES else f", and goes on from step {run.step}"
    return SteeringAnswer(f"run {run.run_id} has {steps} steps now instead of {run.steps}{goes_on}")


async def record_changes(connection: AsyncConnection, request: Request, changes: Mapping[str, Any]) -> SteeringAnswer:
    """Change values of the run's config, all or none. Raises ConfigError for the first one that may not change."""
    run = await _lock(connection, request.run_id)
    old = read_stored_config(run.config)
    new = changed_config(run.config, changes)
    different = {key: config_value(new, key) for key in changes if config_value(old, key) != config_value(new, key)}
    if not different:
        return SteeringAnswer(f"run {run.run_id} has these values already", changed=False)
    if await is_known(connection, request):
        return SteeringAnswer(
            f"run {run.run_id} was changed by this request, and has been changed since", changed=False
        )
    stored = update(RunTable).where(RunTable.run_id == run.run_id)
    await connection.execute(stored.values(config=new.model_dump(mode="json")))
    for key, after in different.items():
        await record(connection, request, SteeringAction.SET, key, config_value(old, key), after, run.next_step)
    texts = [
        f"{key}: {config_value(old, key)} → {after}, for {acts_on(key)}" for key, after in sorted(different.items())
    ]
    later = "" if run.state in OPEN_STATES else f"; the run is {run.state}, so this acts once it goes on"
    return SteeringAnswer("; ".join(texts) + f" (first planned step: {run.next_step}){later}")


async def changed_by(connection: AsyncConnection, run_id: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the config that the run would have after the changes, for checks beyond the config. Raises ConfigError."""
    return changed_config((await runs.the_run(connection, run_id)).config, changes)


async def record_skipped_step(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """Discard the batch of a paused run's next step, so that another takes its place. Raises ConfigError if refused.

    The step's number is planned again from other groups: a learner trains steps without a gap, and a plan row without
    members would publish weights that no batch has changed. A step whose weights are published is not discarded,
    because rollouts were sampled from them. A learner that works on the step is fenced by the epoch.
    """
    if not request.reason:
        raise ConfigError("a discarded step needs a reason, which is kept: `ratchet resume RUN --skip-step -m …`")
    run_id = request.run_id
    columns = select(RunTable.state, RunTable.config_name, RunTable.source_run_id)
    run = (await connection.execute(columns.where(RunTable.run_id == run_id).with_for_update())).one_or_none()
    if run is None or run.config_name == ADHOC:
        raise ConfigError(f"there is no training run {run_id!r}; `ratchet show runs` lists those that there are")
    if await is_known(connection, request):
        return SteeringAnswer("this request has discarded its step already", changed=False)
    if run.source_run_id is not None:
        raise ConfigError(f"run {run_id} trains on stored rollouts: all of its plan rows are written, and none is left")
    if run.state != RunState.PAUSED:
        first = f": `ratchet pause {run_id}` first" if run.state == RunState.RUNNING else ""
        raise ConfigError(f"run {run_id} is {run.state}; a step is discarded while its run is paused{first}")
    step = await plans.unfinished_step(connection, run_id)
    if step is None:
        raise ConfigError(f"run {run_id} has no step that is planned and not trained")
    # Also the rows behind it, which a run with `retrain` has: a step has no plan row before the one before it has.
    is_foreign = BatchItemTable.group_id.in_(select(RolloutGroupTable.id).where(RolloutGroupTable.run_id != run_id))
    is_used = (BatchItemTable.use == "trained") | is_foreign
    of_step = (BatchItemTable.run_id == run_id, BatchItemTable.step >= step, is_used)
    discarded = await connection.execute(delete(BatchItemTable).where(*of_step).returning(BatchItemTable.group_id))
    group_ids = sorted(discarded.scalars())
    cancelling = update(RolloutGroupTable).where(
        RolloutGroupTable.id.in_(group_ids), RolloutGroupTable.run_id == run_id
    )
    cancelled = cancelling.values(state=GroupState.CANCELLED).returning(RolloutGroupTable.workflow_id)
    names = await connection.scalars(cancelled)
    await connection.execute(delete(BatchTable).where(BatchTable.run_id == run_id, BatchTable.step >= step))
    # The next batch overwrites only metrics of the same names: those of other datasets and families would stay.
    await connection.execute(delete(MetricTable).where(MetricTable.run_id == run_id, MetricTable.step == step))
    await connection.execute(
        update(RunTable).where(RunTable.run_id == run_id).values(epoch=RunTable.epoch + 1)  # fences its learner
    )
    await record(connection, request, SteeringAction.SKIP_STEP, f"step/{step}", sorted(names), "discarded", step)
    return SteeringAnswer(
        f"the {len(group_ids)} groups of step {step} are discarded untrained; after `ratchet resume {run_id}` "
        "the step is planned from others"
    )
