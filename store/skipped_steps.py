"""Discard the planned step that cannot be trained, so that another batch takes its place.

| if the process dies | then |
|---|---|
| before the transaction commits | nothing has changed |
| after it | the step has no plan row, its groups are cancelled, and the epoch fences a learner that works on it |

The step's number is planned again from other groups: a learner trains steps without a gap, and a plan row without
members would publish weights that no batch has changed. A step whose weights are published is not discarded, because
rollouts were sampled from them.
"""

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.types import GroupState, RunState, SteeringAction
from store import plans, steering
from store.runs import ADHOC
from store.schema import BatchItemTable, BatchTable, MetricTable, RolloutGroupTable, RunTable
from store.steering import Request, SteeringAnswer


async def record_skipped_step(connection: AsyncConnection, request: Request) -> SteeringAnswer:
    """Discard the batch of a paused run's next step with an audit row. Raises ConfigError with the reason of a
    refusal."""
    if not request.reason:
        raise ConfigError("a discarded step needs a reason, which is kept: `ratchet resume RUN --skip-step -m …`")
    run_id = request.run_id
    columns = select(RunTable.state, RunTable.config_name, RunTable.source_run_id)
    run = (await connection.execute(columns.where(RunTable.run_id == run_id).with_for_update())).one_or_none()
    if run is None or run.config_name == ADHOC:
        raise ConfigError(f"there is no training run {run_id!r}; `ratchet show runs` lists those that there are")
    if await steering.is_known(connection, request):
        return SteeringAnswer("this request has discarded its step already", changed=False)
    if run.source_run_id is not None:
        raise ConfigError(f"run {run_id} trains on stored rollouts: all of its plan rows are written, and none is left")
    if run.state != RunState.PAUSED:
        first = f": `ratchet pause {run_id}` first" if run.state == RunState.RUNNING else ""
        raise ConfigError(f"run {run_id} is {run.state}; a step is discarded while its run is paused{first}")
    step = await plans.unfinished_step(connection, run_id)
    if step is None:
        raise ConfigError(f"run {run_id} has no step that is planned and not trained")
    of_step = (BatchItemTable.run_id == run_id, BatchItemTable.step == step, BatchItemTable.use == "trained")
    discarded = await connection.execute(delete(BatchItemTable).where(*of_step).returning(BatchItemTable.group_id))
    group_ids = sorted(discarded.scalars())
    cancelling = update(RolloutGroupTable).where(RolloutGroupTable.id.in_(group_ids))
    names = (
        await connection.execute(cancelling.values(state=GroupState.CANCELLED).returning(RolloutGroupTable.workflow_id))
    ).scalars()
    await connection.execute(delete(BatchTable).where(BatchTable.run_id == run_id, BatchTable.step == step))
    # The next batch overwrites only metrics of the same names: those of other datasets and families would stay.
    await connection.execute(delete(MetricTable).where(MetricTable.run_id == run_id, MetricTable.step == step))
    await connection.execute(
        update(RunTable).where(RunTable.run_id == run_id).values(epoch=RunTable.epoch + 1)  # fences its learner
    )
    await steering.record(
        connection, request, SteeringAction.SKIP_STEP, f"step/{step}", sorted(names), "discarded", step
    )
    return SteeringAnswer(
        f"the {len(group_ids)} groups of step {step} are discarded untrained; after `ratchet resume {run_id}` "
        "the step is planned from others"
    )
