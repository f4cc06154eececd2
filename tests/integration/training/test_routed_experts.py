"""Recorded experts take far more room than all else of a turn, and are dropped once no step can need them."""

from sqlalchemy import func, select, update

from ratchet.types import Purpose
from store import learner_commits
from store.database import Database
from store.schema import BatchItemTable, RolloutTable, TurnTable
from tests.integration.training.records import make_config
from tests.integration.training.test_planner import make, plan


async def steps_with_experts(database: Database, run_id: str) -> set[int]:
    """Return the steps that have consumed groups with recorded experts; 0 for rollouts of no step."""
    step = func.coalesce(BatchItemTable.step, 0)
    recorded = (
        select(step)
        .select_from(TurnTable)
        .join(RolloutTable, RolloutTable.id == TurnTable.rollout_id)
        .outerjoin(BatchItemTable, BatchItemTable.group_id == RolloutTable.group_id)
        .where(RolloutTable.run_id == run_id, TurnTable.routed_experts.is_not(None))
    )
    async with database.begin() as connection:
        return set((await connection.execute(recorded)).scalars())


async def test_experts_stay_while_a_kept_checkpoint_may_need_them(database: Database, run_id: str) -> None:
    config = make_config()
    groups = await make(database, run_id, config, *({} for _ in range(7)))
    for _ in range(3):
        await plan(database, run_id, config)
    async with database.begin() as connection:
        mine = TurnTable.rollout_id.in_(select(RolloutTable.id).where(RolloutTable.run_id == run_id))
        await connection.execute(update(TurnTable).where(mine).values(routed_experts=b"experts"))
        evaluation = update(RolloutTable).where(RolloutTable.group_id == groups[-1]).values(purpose=Purpose.EVAL)
        await connection.execute(evaluation)
        lease = await learner_commits.take_lease(connection, run_id)
    assert await steps_with_experts(database, run_id) == {0, 1, 2, 3}
    left = []
    for step in (1, 2, 3):
        async with database.begin() as connection:
            await learner_commits.commit_checkpoint(connection, lease, step, f"/c/step{step}.e1", 1, 1, {"s": 0.0})
            await learner_commits.drop_routed_experts(connection, lease)
        left.append(await steps_with_experts(database, run_id))
    assert left == [{1, 2, 3}, {2, 3}, {3}], "of the evaluation at once, of a step with the checkpoint after its own"
