"""Two training runs at once in one installation: each has an engine set, a model, and a learner of its own.

The engines' wrappers and the learners' ranks are the product's. In the place of vLLM is an engine whose answers follow
from task and member, so that one member of each group solves its task.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import WorkflowHandle

from engine.process import EngineSettings
from ratchet.config import RunConfig
from ratchet.types import EngineState
from stack.ports import free_port
from stack.serving_plan import ServingPlan, StackPlan, read_plan, write_plan
from store.schema import (
    BatchTable,
    EngineLoadTable,
    EngineTable,
    PolicyVersionTable,
    RolloutTable,
    RunTable,
    TurnTable,
)
from tests.chaos.seeded_engine import HOLD_FACTOR_VARIABLE, SOLVED_FILE, SOLVED_TEXT
from tests.integration.training.ranks import Group
from tests.integration.workflows.conftest import ROOT, Loop
from tests.standins.tiny_model import make_tokenizer, make_weights
from training.rank_runtime import RankSettings

pytestmark = pytest.mark.timeout(1200)
STEPS = 2
_COMMIT = "git -c user.name=x -c user.email=x@x commit -qm first"
TASK = {
    "pre_commands": [f"git init -q . && echo one > {SOLVED_FILE} && git add -A && {_COMMIT}"],
    "eval_cmd": f'test "$(cat {SOLVED_FILE})" = {SOLVED_TEXT}',
    "empty_patch_fails": True,
}
WRAPPER = """
import asyncio, sys
from engine import process
from engine.wrapper import run_engine
settings = process.EngineSettings.model_validate_json(sys.argv[1])
slots = "0" if settings.lora_rank is None else str(settings.lora_runs)
arguments = [str(settings.port), str(settings.model_path), sys.argv[2], "1", settings.database_url, slots]
process.vllm_command = lambda settings, model: [sys.executable, "-m", "tests.chaos.seeded_engine", *arguments]
asyncio.run(run_engine(settings))
"""


@dataclass
class Side:
    """A run with its engine set, which has the run's name unless the run shares it."""

    loop: Loop
    name: str
    config: dict[str, Any]
    model: Path
    port: int = field(default_factory=free_port)
    wrapper: "subprocess.Popen[bytes] | None" = None
    learner: Group | None = None

    @property
    def handle(self) -> WorkflowHandle[Any, Any]:
        return self.loop.client.get_workflow_handle(f"run/{self.name}")

    @property
    def calls(self) -> Path:
        return self.loop.home / f"{self.name}.jsonl"

    @property
    def rollouts_asked(self) -> set[int]:
        """The rollouts whose calls have reached the engine."""
        lines = [json.loads(line) for line in self.calls.read_text().splitlines()]
        return {line["rollout"] for line in lines if line["event"] == "asked"}

    def start_engine(self) -> None:
        settings = EngineSettings(
            model_path=self.model,
            engine_set=self.config["engine_set"],
            lora_rank=(self.config["training"].get("lora") or {}).get("rank"),
            lora_runs=self.config.get("engine", {}).get("lora_runs", 1),
            port=self.port,
            database_url=self.loop.environment["RATCHET_DATABASE_URL"],
            state_dir=self.loop.home,
            policies_root=self.loop.home / "policies",
        )
        command = [sys.executable, "-c", WRAPPER, settings.model_dump_json(), str(self.calls)]
        environment = {**os.environ, HOLD_FACTOR_VARIABLE: "0.1"}
        with self.loop.log(f"engine-{self.name}").open("ab") as log:
            self.wrapper = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)

    def kill_engine(self) -> None:
        assert self.wrapper is not None
        self.wrapper.kill()
        self.wrapper.wait()

    def start_learner(self, directory: Path) -> None:
        url = self.loop.environment["RATCHET_DATABASE_URL"]
        settings = RankSettings(self.name, url, self.loop.home / "policies", self.loop.home / "checkpoints")
        self.learner = Group(settings, 1, directory / self.name)

    def end(self) -> None:
        if self.wrapper is not None:
            self.wrapper.terminate()
            self.wrapper.wait()
        if self.learner is not None:
            self.learner.kill()

    async def value(self, statement: Any) -> Any:
        async with self.loop.database.begin() as connection:
            return (await connection.execute(statement)).scalar_one_or_none()

    async def is_ready(self) -> Any:
        of_set = (EngineTable.engine_set == self.config["engine_set"], EngineTable.state == EngineState.READY)
        return await self.value(select(func.max(EngineTable.id)).where(*of_set))

    async def step(self) -> Any:
        return await self.value(select(func.max(PolicyVersionTable.step)).where(PolicyVersionTable.run_id == self.name))

    async def has_row(self) -> Any:
        return await self.value(select(RunTable.run_id).where(RunTable.run_id == self.name))

    async def state(self) -> Any:
        return await self.value(select(RunTable.state).where(RunTable.run_id == self.name))


def run_values(loop: Loop, model: Path, engine_set: str) -> dict[str, Any]:
    """Return the config of a run of two steps, whose rollouts the seeded engine answers."""
    return {
        "model": str(model),
        "engine_set": engine_set,
        "datasets": [{"path": loop.dataset(**TASK)}],
        "harness": {"name": "bash_agent", "max_turns": 12},
        "sampling": {"max_context_tokens": 4096, "max_response_tokens": 512},
        "loss": {"preset": "grpo"},
        "training": {
            "steps": STEPS,
            "groups_per_step": 1,
            "group_size": 2,
            "bin_tokens": 4096,
            "checkpoint_every": 1,
            "max_staleness": 4,
        },
        "evaluation": {"at": []},
        "grading": {"admission": "ignored"},
        "limits": {"agent_seconds": 120, "eval_seconds": 20},
    }


@asynccontextmanager
async def serving(loop: Loop, sides: list[Side], plans: dict[str, ServingPlan]) -> AsyncIterator[list[Side]]:
    """Serve these sets beside those of the stack during the block, after which the sides end."""
    before = read_plan(loop.stack)
    write_plan(loop.stack, StackPlan(sets=before.sets | plans))
    try:
        yield sides
    finally:
        for side in sides:
            side.end()
        write_plan(loop.stack, before)


@pytest.fixture
async def sides(loop: Loop, tmp_path: Path) -> AsyncIterator[list[Side]]:
    found, plans = [], {}
    for number, size in enumerate((560, 600)):
        model = tmp_path / f"model{number}"
        make_tokenizer(model, vocab_size=size)
        make_weights(model, seed=number)
        name = f"side{number}-{uuid4().hex[:6]}x"
        values = run_values(loop, model, name)
        plans[name] = ServingPlan(config=RunConfig.model_validate(values), model_path=model)
        found.append(Side(loop, name, values, model))
    async with serving(loop, found, plans):
        yield found


async def test_two_runs_are_trained_at_once_each_by_its_own_engines(
    loop: Loop, sides: list[Side], tmp_path: Path
) -> None:
    left, right = sides
    for side in sides:
        side.start_engine()
    for side in sides:
        await loop.until(side.is_ready, f"the engine of {side.name} is ready")
        argument = {"config": side.config}
        await loop.client.start_workflow("TrainRun", argument, id=f"run/{side.name}", task_queue="control")
    for side in sides:
        await loop.until(side.has_row, f"{side.name} is accepted beside the other run")
        side.start_learner(tmp_path)
    await loop.until(right.step, "the right run has trained a step")
    left.kill_engine()
    left.start_engine()
    await asyncio.gather(*(loop.result(side.handle, 900) for side in sides))
    assert [await side.state() for side in sides] == ["done", "done"]
    for side in sides:
        await _require_separate(loop, side)


async def require_own_rollouts(connection: AsyncConnection, side: Side) -> set[int]:
    """Return the run's rollouts, after seeing that each of its steps was trained on them alone."""
    own = set((await connection.execute(select(RolloutTable.id).where(RolloutTable.run_id == side.name))).scalars())
    members = (await connection.execute(select(BatchTable.members).where(BatchTable.run_id == side.name))).scalars()
    trained = [{one["rollout_id"] for one in step} for step in members]
    assert len(trained) == STEPS and all(step and step <= own for step in trained)
    return own


async def _require_separate(loop: Loop, side: Side) -> None:
    """The run's steps, calls and weights are all its own."""
    async with loop.database.begin() as connection:
        own = await require_own_rollouts(connection, side)
        loaded = select(EngineTable.engine_set, EngineLoadTable.version).join(
            EngineLoadTable, EngineLoadTable.engine_id == EngineTable.id
        )
        loads = list(await connection.execute(loaded.where(EngineTable.engine_set == side.name)))
        elsewhere = loaded.where(EngineTable.engine_set != side.name, EngineLoadTable.version.like(f"{side.name}/%"))
        assert list(await connection.execute(elsewhere)) == []
        turns = select(EngineTable.engine_set, TurnTable.version_spans).join(
            EngineTable, EngineTable.id == TurnTable.engine_id
        )
        answered = list(await connection.execute(turns.where(TurnTable.rollout_id.in_(own))))
    assert loads and all(row.version.startswith(f"{side.name}/") for row in loads)
    assert side.rollouts_asked and side.rollouts_asked <= own
    assert {row.engine_set for row in answered} == {side.name}
    spans = {span["version"] for row in answered for span in row.version_spans or ()}
    assert spans and all(version.startswith(f"{side.name}/") for version in spans), spans
