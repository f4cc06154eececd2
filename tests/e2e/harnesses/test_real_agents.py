"""Each real agent, end to end: box, program, adapter, edits, diff, verdict, turns in Postgres; also with a killed
worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from sandboxes import base
from sandboxes.e2b import E2BProvider
from store.schema import AttemptTable, SandboxTable, TurnTable
from tests.e2e.harnesses.conftest import require_program
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_time import USE_BUDGET

pytestmark = pytest.mark.timeout(900)

PRE = (
    "git init -q . && printf 'def add(a, b):\\n    return a - b\\n' > calc.py && git add -A && git -c"
    " user.name=x -c user.email=x@x commit -qm first"
)
TASK = {
    "problem_statement": "add() subtracts.",
    "pre_commands": [PRE],
    "eval_cmd": "/opt/ratchet/bin/python3 -c 'from calc import add; assert add(2, 3) == 5'",
    "empty_patch_fails": True,
}
FIX = "sed 's/a - b/a + b/' calc.py >fixed && mv fixed calc.py"
"""Not `sed -i`, which Qwen Code refuses for a file that it has not read."""
LIMITS = {"agent_seconds": 300, "eval_seconds": 60}
LONG = {"sampling": {"max_context_tokens": 400_000, "max_response_tokens": 2_000}, "training": {"bin_tokens": 400_000}}
"""The test's tokenizer makes several tokens of a word, and these programs begin with 50 KB of instructions."""


@dataclass(frozen=True)
class Agent:
    """One agent program. `tool`: its shell tool and that tool's argument. `last`: its last action and words."""

    harness: str
    fetch: str
    tool: str
    argument: str
    last: tuple[str, ...]

    def call(self, command: str) -> str:
        return (
            f"<tool_call>\n<function={self.tool}>\n<parameter={self.argument}>\n{command}\n</parameter>"
            "\n</function>\n</tool_call>"
        )

    @property
    def ending(self) -> tuple[str, ...]:
        return tuple(self.call(word.removeprefix("$ ")) if word.startswith("$ ") else word for word in self.last)


AGENTS = [
    Agent("claude_code", "claude-code", "Bash", "command", ("Fixed.",)),
    Agent("codex", "codex", "exec_command", "cmd", ("Fixed.",)),
    Agent("opencode", "opencode", "bash", "command", ("Fixed.",)),
    Agent("qwen_code", "qwen-code", "run_shell_command", "command", ("Fixed.",)),
    Agent("mini_swe_agent", "mini-swe-agent", "bash", "command", ("$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",)),
]


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.harness)
def agent(request: pytest.FixtureRequest) -> Agent:
    found: Agent = request.param
    require_program(found.fetch)
    return found


async def begin(loop: Loop, agent: Agent, **config: Any) -> Any:
    return await loop.start(
        loop.dataset(**TASK), limits=LIMITS, harness={"name": agent.harness, "max_turns": 20}, **LONG, **config
    )


async def transcript(loop: Loop, rollout_id: int) -> str:
    from store.arrays import unpack_text

    async with loop.database.begin() as connection:
        data = (
            (await connection.execute(select(AttemptTable.transcript).where(AttemptTable.rollout_id == rollout_id)))
            .scalars()
            .first()
        )
    return unpack_text(data)[-3000:] if data else "no transcript"


async def test_an_agent_solves_a_task(loop: Loop, agent: Agent) -> None:
    await loop.script(agent.call(FIX), *agent.ending)
    handle = await begin(loop, agent)
    await asyncio.wait_for(handle.result(), 600)
    row = await loop.rollout(handle)
    assert (row.outcome, row.reward, row.agent_exit) == ("graded", 1.0, "done"), await transcript(loop, row.id)
    async with loop.database.begin() as connection:
        turns = (
            await connection.execute(select(TurnTable.state, TurnTable.delivered).where(TurnTable.rollout_id == row.id))
        ).all()
        version = (
            await connection.execute(select(AttemptTable.harness_version).where(AttemptTable.rollout_id == row.id))
        ).scalar_one()
        boxes = (
            (await connection.execute(select(SandboxTable.state).where(SandboxTable.rollout_id == row.id)))
            .scalars()
            .all()
        )
    assert len(turns) >= 2 and set(turns) == {("completed", True)}
    assert version and boxes == ["released", "released"]


async def test_a_killed_worker_finds_the_same_agent_at_work(loop: Loop, agent: Agent) -> None:
    """After a kill -9 of the worker the program continues under the same pid, and the next try re-attaches to it."""
    hold = f"kill-{agent.harness}"
    await loop.script(agent.call(FIX), hold=hold)
    handle = await begin(loop, agent)

    box_id = await box_of_agent(loop, handle, "in_flight")
    before = await processes(loop, box_id)
    loop.end("worker", kill=True)
    loop.spawn("worker")
    await loop.script(*agent.ending)
    assert await processes(loop, box_id) == before
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        await http.post(f"http://127.0.0.1:{loop.stack.ports['engine']}/release", json={"hold": hold})
    await asyncio.wait_for(handle.result(), 600)
    row = await loop.rollout(handle)
    assert (row.outcome, row.reward, row.attempt) == ("graded", 1.0, 1), await transcript(loop, row.id)


async def test_at_its_deadline_an_agent_and_all_that_it_started_end_and_the_diff_is_taken(
    loop: Loop, agent: Agent
) -> None:
    left_behind = "(setsid sh -c 'while :; do sleep 0.1; done' >/dev/null 2>&1 &)"
    await loop.script(agent.call(f"{FIX}; {left_behind}; tail -f /dev/null"))
    handle = await begin(loop, agent)
    async with box_in(loop, await box_of_agent(loop, handle, "completed")) as box:

        async def holds(condition: str) -> bool:
            return (await box.exec(condition, check=False)).exit_code == 0

        at_work = "grep -q 'a + b' /workspace/repo/calc.py && pgrep -u agent tail && pgrep -u agent -f 'while :'"
        await loop.until(lambda: holds(at_work), "the agent has its edit made and hangs in a command")
        loop.end("worker", kill=True)  # or the box would be gone before it can be looked at
        await box.exec(USE_BUDGET)
        await loop.until(lambda: holds("test -s /run/ratchet/1/reached"), "the launcher has suspended the tree")
        # D: a shell that waits for its child between vfork and exec; the child is stopped.
        assert not await holds("ps -u agent -o stat= | grep -v '^[ZTD]'")
    loop.spawn("worker")
    await asyncio.wait_for(handle.result(), 600)
    row = await loop.rollout(handle)
    assert (row.outcome, row.reward, row.agent_exit) == ("graded", 1.0, "time_budget"), await transcript(loop, row.id)


async def box_of_agent(loop: Loop, handle: Any, turn_state: str) -> str:
    """Return as soon as one of the rollout's model calls is in this state."""

    async def found() -> str | None:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            turns = select(func.count()).where(TurnTable.rollout_id == row.id, TurnTable.state == turn_state)
            if not (await connection.execute(turns)).scalar_one():
                return None
            return (
                await connection.execute(select(SandboxTable.provider_id).where(SandboxTable.rollout_id == row.id))
            ).scalar_one()

    return str(await loop.until(found, f"a model call is {turn_state}"))


@contextlib.asynccontextmanager
async def box_in(loop: Loop, box_id: str) -> AsyncIterator[base.Sandbox]:
    environment = loop.environment
    provider = E2BProvider(environment["E2B_API_KEY"], environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"])
    box = await provider.connect(box_id)
    try:
        yield box
    finally:
        await box.close()
        await provider.close()


async def processes(loop: Loop, box_id: str) -> str:
    """Return pids and start times of the launcher, by its own record, and of the agent's program, the first of its
    user."""
    async with box_in(loop, box_id) as box:
        launcher = 'read boot pid start </run/ratchet/1/launcher; kill -0 "$pid" && echo "$pid $start"'
        program = 'agent=$(pgrep -o -u agent) && sed "s/.*) //" "/proc/$agent/stat" | cut -d " " -f 20 && echo "$agent"'
        return (await box.exec(f"{launcher} && {program}")).stdout
