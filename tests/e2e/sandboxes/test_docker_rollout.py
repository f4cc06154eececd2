"""One rollout whose boxes are containers, with the same stages, agent and grader as elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select

from store.schema import AttemptTable, SandboxTable, TurnTable
from tests.e2e.sandboxes.conftest import docker
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import PRE, call, finish

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
MEMORY = "$(cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes)"
TASK = {
    "pre_commands": [PRE],
    "eval_cmd": f'test "$(cat a.txt) {MEMORY}" = "two {512 << 20}"',
    "empty_patch_fails": True,
}


@pytest.mark.parametrize(("work", "reward"), [("echo two > a.txt", 1.0), ("echo three > a.txt", 0.0)])
async def test_a_rollout_in_containers(loop: Loop, docker_directory: Path, work: str, reward: float) -> None:
    await loop.script(call(work), "Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK), sandbox={"memory_mib": 512}))
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns) == ("graded", reward, "done", 2), row.outcome_reason
    async with loop.database.begin() as connection:
        boxes = (
            await connection.execute(
                select(SandboxTable.provider, SandboxTable.role, SandboxTable.state).where(
                    SandboxTable.rollout_id == row.id
                )
            )
        ).all()
        turns = (
            await connection.execute(select(TurnTable.state, TurnTable.delivered).where(TurnTable.rollout_id == row.id))
        ).all()
        used = (
            await connection.execute(select(AttemptTable.used_seconds).where(AttemptTable.rollout_id == row.id))
        ).scalar_one()
    num_graded = 1 if reward else 2  # no test is named that failed, so a second box decides
    assert sorted(boxes) == [("docker", "agent", "released"), *[("docker", "grade", "released")] * num_graded]
    assert turns == [("completed", True)] * 2 and used > 0
    assert docker(docker_directory, "ps", "-aq", "--filter", "name=ratchet-").stdout == b""


async def test_the_ledger_is_shown_beside_what_docker_has(loop: Loop) -> None:
    command = [sys.executable, "-m", "cli.main", "admin", "sandboxes", "--all", "--json"]
    shown = subprocess.run(command, env=loop.environment, capture_output=True, text=True, check=True)
    assert {(row["provider"], row["at_provider"]) for row in json.loads(shown.stdout)} == {("docker", "not listed")}
