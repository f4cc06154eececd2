"""Assignment of boxes to rollouts if boxes are short: a rollout that has started gets its grading box."""

from typing import Any
from uuid import uuid4

from sqlalchemy import insert, select, update

from ratchet.types import SandboxRole
from store import sandboxes
from store.schema import PatchTable, RolloutTable, RunTable, SandboxTable
from tests.integration.training.records import make_config, make_group, make_run
from tests.integration.workflows.conftest import Loop


async def test_a_patch_that_waits_for_its_grading_box_keeps_its_room(loop: Loop) -> None:
    provider, run_id = f"provider-{uuid4().hex[:8]}", f"room-{uuid4().hex[:8]}"
    await make_run(loop.database, run_id, make_config())

    async def ask(role: SandboxRole, rollout_id: int, max_boxes: int = 3, max_boots: int = 9) -> Any:
        """Ask for a box; of three boxes one is reserved for grading, so two agents may run."""
        new = sandboxes.NewSandbox(
            provider=provider, role=role, rollout_id=rollout_id, attempt=1, workflow_id=run_id, image="host"
        )
        async with loop.database.begin() as connection:
            return await sandboxes.reserve_sandbox(connection, new, max_boxes, max_boots)

    async with loop.database.begin() as connection:
        await make_group(connection, run_id, 0, [0.0, 0.0, 0.0])
        statement = select(RolloutTable.id).where(RolloutTable.run_id == run_id).order_by(RolloutTable.id)
        first, second, third = (await connection.execute(statement)).scalars()
        await connection.execute(
            update(RolloutTable).where(RolloutTable.run_id == run_id).values(outcome=None, reward=None, agent_exit=None)
        )

    box = await ask(SandboxRole.AGENT, first)
    assert box is not None and await ask(SandboxRole.AGENT, second) is not None
    assert await ask(SandboxRole.AGENT, third) is None, "two are in"
    async with loop.database.begin() as connection:  # the first agent is done: its patch is stored and its box gone
        patch = {"rollout_id": first, "attempt": 1, "base_commit": "", "diff": b"", "num_bytes": 0, "num_files": 0}
        await connection.execute(insert(PatchTable).values(**patch))
        await sandboxes.mark_released(connection, box.id)
    assert await ask(SandboxRole.AGENT, third) is None, "the room is the first one's until its verdict"
    graded = await ask(SandboxRole.GRADE, first)
    assert graded is not None
    async with loop.database.begin() as connection:
        await connection.execute(update(RolloutTable).where(RolloutTable.id == first).values(outcome="infra_failed"))
        await sandboxes.mark_released(connection, graded.id)
    assert await ask(SandboxRole.AGENT, third) is not None
    async with loop.database.begin() as connection:
        await connection.execute(update(RolloutTable).where(RolloutTable.run_id == run_id).values(outcome="cancelled"))
        await connection.execute(update(SandboxTable).where(SandboxTable.provider == provider).values(state="released"))
        await connection.execute(
            update(RunTable).where(RunTable.run_id == run_id).values(state="done")
        )  # or none starts
