"""Two training runs with LoRA on one engine: each is answered by its own adapter, and trained on its own tokens.

The wrapper and the learners' ranks are the product's. In the place of vLLM is the engine of `test_two_runs.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import select

from ratchet.config import RunConfig
from ratchet.lora_slots import versions_of_label
from stack.serving_plan import ServingPlan
from store.schema import EngineTable, RunTable, TurnTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_two_runs import Side, require_own_rollouts, run_values, serving
from tests.standins.tiny_model import make_tokenizer, make_weights

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
async def sides(loop: Loop, tmp_path: Path) -> AsyncIterator[list[Side]]:
    """Two runs of one set and one model; the first side has the engine."""
    model, engine_set = tmp_path / "model", f"shared{uuid4().hex[:6]}x"
    make_tokenizer(model, vocab_size=560)
    make_weights(model)
    found = []
    for number in range(2):
        values = run_values(loop, model, engine_set) | {"engine": {"lora_runs": 2}, "seed": number}
        values["training"] |= {"lora": {"rank": 4, "alpha": 8}}
        found.append(Side(loop, f"{engine_set}-{number}", values, model))
    plan = ServingPlan(config=RunConfig.model_validate(found[0].config), model_path=model)
    async with serving(loop, found, {engine_set: plan}):
        yield found


async def test_two_runs_are_trained_at_once_on_one_engine(loop: Loop, sides: list[Side], tmp_path: Path) -> None:
    left, right = sides
    left.start_engine()
    await loop.until(left.is_ready, "the engine is ready")
    for side in sides:
        argument = {"config": side.config}
        await loop.client.start_workflow("TrainRun", argument, id=f"run/{side.name}", task_queue="control")
        await loop.until(side.has_row, f"{side.name} is accepted")
        side.start_learner(tmp_path)
    await loop.until(right.step, "the second run has trained a step")
    left.kill_engine()
    left.start_engine()
    await asyncio.gather(*(loop.result(side.handle, 900) for side in sides))
    assert [await side.state() for side in sides] == ["done", "done"]
    for side in sides:
        await _require_separate(loop, side)
    slots = [await side.value(select(RunTable.lora_slot).where(RunTable.run_id == side.name)) for side in sides]
    assert slots == [1, 2]
    of_set = select(EngineTable.version).where(EngineTable.engine_set == left.config["engine_set"])
    served = {version.partition("/")[0] for version in versions_of_label(await left.value(of_set)).values()}
    assert served <= {left.name, right.name} and served


async def _require_separate(loop: Loop, side: Side) -> None:
    """The run was trained on its own rollouts, and every token of them has a version of the run."""
    async with loop.database.begin() as connection:
        own = await require_own_rollouts(connection, side)
        turns = select(TurnTable.version_spans).where(TurnTable.rollout_id.in_(own))
        spans = [span for found in (await connection.execute(turns)).scalars() for span in found or ()]
    assert spans and {span["version"].partition("/")[0] for span in spans} == {side.name}
