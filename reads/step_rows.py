"""The rows of one step: its plan, discarded ones, its tokens with the largest ratios, and the groups it trains."""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.token_statistics import TrainedToken
from ratchet.types import JsonObject, SteeringAction
from store import plans
from store.columns import columns_of, read_one
from store.schema import BatchItemTable, BatchTable, SteeringTable, StepTokenTable


@dataclass(slots=True, frozen=True)
class StepHead:
    """The plan row of a step without its members. `stepped_at`: when it was first trained."""

    step: int
    state: str
    knobs: JsonObject
    denominators: list[JsonObject]
    epoch: int | None
    planned_at: datetime
    stepped_at: datetime | None
    committed_at: datetime | None


async def read_step_head(connection: AsyncConnection, run_id: str, step: int) -> StepHead | None:
    columns = columns_of(StepHead, BatchTable, stepped_at=plans.first_trained_at())
    statement = select(*columns).where(BatchTable.run_id == run_id, BatchTable.step == step)
    return await read_one(connection, StepHead, statement)


@dataclass(slots=True, frozen=True)
class DiscardedPlan:
    """A plan row of `step` that a person has discarded (`ratchet resume --skip-step`), with its groups' workflows."""

    step: int
    asked_by: str
    reason: str
    at: datetime
    groups: list[str]

    def sentence(self) -> str:
        number = len(self.groups)
        return (
            f"{self.asked_by} discarded a plan of step {self.step} at {self.at.astimezone(UTC):%Y-%m-%d %H:%M} UTC, "
            f"with {number} {'group' if number == 1 else 'groups'} that no step trains: {self.reason}"
        )


async def discarded_plans(
    connection: AsyncConnection, run_id: str, step: int | None = None, group: str | None = None
) -> list[DiscardedPlan]:
    """Return the discarded plans of a step, or those with the group of this workflow, oldest first."""
    wanted = (SteeringTable.run_id == run_id) & (SteeringTable.action == SteeringAction.SKIP_STEP)
    if step is not None:
        wanted &= SteeringTable.target == f"step/{step}"
    if group is not None:
        wanted &= SteeringTable.before.contains([group])
    columns = (SteeringTable.from_step, SteeringTable.asked_by, SteeringTable.reason, SteeringTable.asked_at)
    statement = select(*columns, SteeringTable.before).where(wanted).order_by(SteeringTable.id)
    return [DiscardedPlan(*row) for row in await connection.execute(statement)]


async def read_step_tokens(connection: AsyncConnection, run_id: str, step: int) -> list[TrainedToken]:
    """Return the tokens that the learner has recorded for the step, the furthest first."""
    of_step = (StepTokenTable.run_id == run_id) & (StepTokenTable.step == step)
    statement = select(*columns_of(TrainedToken, StepTokenTable)).where(of_step).order_by(StepTokenTable.no)
    return [TrainedToken(*row) for row in await connection.execute(statement)]


@dataclass(slots=True, frozen=True)
class GroupTraining:
    """A step that trains a group. `run_id`: of the step, which is another run's if that trains on stored groups.
    `stepped_at`: None while it is only planned. `min_policy_step`: tokens of older weights are not trained."""

    run_id: str
    step: int
    stepped_at: datetime | None
    min_policy_step: int


async def list_trainings(connection: AsyncConnection, group_id: int) -> list[GroupTraining]:
    """Return the steps that train the group, the first one first; no run trains a group twice."""
    columns = (BatchTable.run_id, BatchTable.step, BatchTable.stepped_at)
    bound = BatchTable.knobs["min_policy_step"].as_integer()
    statement = (
        select(*columns, bound)
        .join(BatchItemTable, (BatchItemTable.run_id == BatchTable.run_id) & (BatchItemTable.step == BatchTable.step))
        .where(BatchItemTable.group_id == group_id, BatchItemTable.use == "trained")
        .order_by(plans.first_trained_at().asc().nulls_last(), BatchTable.planned_at, BatchTable.run_id)
    )
    return [GroupTraining(*row) for row in await connection.execute(statement)]
