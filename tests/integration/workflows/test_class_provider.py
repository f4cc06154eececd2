"""A whole rollout in boxes of a class with four methods: workspace, agent, diff and grade have no second path."""

import pytest
from sqlalchemy import select

from store.schema import SandboxTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, call, finish

pytestmark = pytest.mark.timeout(600)


async def test_a_rollout_in_a_ported_sandbox(loop: Loop) -> None:
    name = "tests.standins.local_box:LocalBox"
    loop.end("worker")
    kept = dict(loop.environment)
    try:
        loop.environment["RATCHET_SANDBOX_PROVIDER"] = name
        loop.spawn("worker")
        await loop.script(call("echo two > a.txt"), "Done.")
        _, row = await finish(loop, await loop.start(loop.dataset(**TASK)))
    finally:
        loop.end("worker")
        loop.environment.clear()
        loop.environment.update(kept)
        loop.spawn("worker")
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns) == ("graded", 1.0, "done", 2)
    async with loop.database.begin() as connection:
        statement = select(SandboxTable.provider, SandboxTable.state).where(SandboxTable.rollout_id == row.id)
        assert [tuple(box) for box in await connection.execute(statement)] == [(name, "released")] * 2
