"""Evaluations at will: a run of zero steps, one that an open run makes, and what has no verdict is run again."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ActivityError

from client import evaluating, steering
from client.evaluating import EvaluationSettings
from ratchet.config_sources import resolve_config
from ratchet.errors import ConfigError
from ratchet.types import Purpose, SteeringAction
from reads.rollouts import describe_rollout
from store import runs
from store.schema import RolloutTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import TASK
from tests.integration.workflows.test_rollout import call
from tests.standins.chat_engine import ChatEngine, refuses, says

pytestmark = pytest.mark.timeout(600)


class Evaluated:
    """A run with one held-out task, whose hidden test passes without a patch, and whose agents are held."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.run_id = f"evaluated-{uuid4().hex[:8]}"
        self.handle = loop.client.get_workflow_handle(f"run/{self.run_id}")

    async def begin(self, steps: int, at: list[str], **more: Any) -> None:
        await self.loop.script(*["I give up."] * 8, hold=self.run_id)
        path = self.loop.dataset(**TASK, eval_cmd="true")
        self.dataset = Path(path)
        config = {
            "model": str(self.loop.model),
            "datasets": [{"path": path, "use": "eval"}, *([{"path": path}] if steps else [])],
            "grading": {"admission": "ignored"},
            "training": {"steps": steps, "groups_per_step": 1, "group_size": 2, "max_replacements": 0},
            "limits": {"agent_seconds": 120, "eval_seconds": 20},
            "evaluation": {"at": at, "temperatures": [1.0], "samples": 2},
            **more,
        }
        await self.loop.client.start_workflow("TrainRun", {"config": config}, id=self.handle.id, task_queue="control")

    async def rollouts(self, purpose: Purpose = Purpose.EVAL) -> list[Any]:
        columns = (RolloutTable.id, RolloutTable.workflow_id, RolloutTable.outcome, RolloutTable.claimed_at)
        statement = select(*columns).where(RolloutTable.run_id == self.run_id, RolloutTable.purpose == purpose)
        async with self.loop.database.begin() as connection:
            return list(await connection.execute(statement.order_by(RolloutTable.id)))

    async def working(self, count: int, purpose: Purpose = Purpose.EVAL) -> list[Any]:
        async def found() -> list[Any]:
            rows = await self.rollouts(purpose)
            return rows if sum(row.claimed_at is not None and row.outcome is None for row in rows) >= count else []

        rows: list[Any] = await self.loop.until(found, f"{count} agents work")
        return rows

    async def state(self) -> str:
        async with self.loop.database.begin() as connection:
            row = await runs.get_run(connection, self.run_id)
        assert row is not None
        return row.state


@pytest.fixture
async def evaluated(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Evaluated]:
    for name in ("RATCHET_TEMPORAL_CONFIG", "RATCHET_DATABASE_URL", "TEMPORAL_ADDRESS"):
        if name in loop.environment:
            monkeypatch.setenv(name, loop.environment[name])
    found = Evaluated(loop)
    yield found
    await loop.release(found.run_id)
    if (await found.handle.describe()).status is WorkflowExecutionStatus.RUNNING:
        await found.handle.cancel()
    with contextlib.suppress(WorkflowFailureError):  # the next test's run is refused beside an open one
        await loop.result(found.handle)

    async def nothing_runs() -> bool:
        rows = await found.rollouts() + await found.rollouts(Purpose.TRAIN)
        return all(row.outcome is not None or row.claimed_at is None for row in rows)

    await loop.until(nothing_runs, "every rollout has ended")
    await loop.forget_script()


async def test_what_has_no_verdict_is_no_failure_and_is_run_again(evaluated: Evaluated, loop: Loop) -> None:
    await evaluated.begin(steps=0, at=["start"])
    first, _ = await evaluated.working(2)
    await steering.steer_target(loop.stack, SteeringAction.CANCEL, str(first.id), "anna")

    async def cancelled() -> bool:
        return (await evaluated.rollouts())[0].outcome == "cancelled"

    await loop.until(cancelled, "one rollout has no verdict")
    await loop.release(evaluated.run_id)
    assert await loop.result(evaluated.handle) == evaluated.run_id
    assert await evaluated.state() == "done", "a run of zero steps only evaluates"
    report = (await evaluating.read_reports(loop.stack, evaluated.run_id))["evaluations"]["start-t1"]
    assert (report["rollouts"], report["verdicts"], report["without_verdict"], report["solved"]) == (2, 1, 1, 1)
    assert report["pass_at_k"]["1"]["mean"] == 1.0 and "2" not in report["pass_at_k"]

    await loop.forget_script()
    await loop.script("I give up.")
    name = f"evaluate/{evaluated.run_id}/start-t1"
    answer = await steering.steer_target(loop.stack, SteeringAction.RETRY, name, "anna")
    assert answer.changed and "1 rollouts without a verdict run again" in answer.text

    async def done_again() -> bool:
        rows = await evaluated.rollouts()
        return len(rows) == 3 and rows[2].outcome == "graded" and await evaluated.state() == "done"

    await loop.until(done_again, "the evaluation has ended again")
    report = (await evaluating.read_reports(loop.stack, evaluated.run_id))["evaluations"]["start-t1"]
    assert (report["rollouts"], report["verdicts"], report["without_verdict"]) == (2, 2, 0)
    assert report["pass_all_k"]["2"]["mean"] == 1.0
    with pytest.raises(ConfigError, match="every rollout has a verdict"):
        await steering.steer_target(loop.stack, SteeringAction.RETRY, name, "anna")
    same = await evaluating.compare_evaluations(loop.stack, evaluated.run_id, f"{evaluated.run_id}:start-t1")
    assert (same["difference"]["mean"], same["p_value"]) == (0.0, 1.0)
    with pytest.raises(ConfigError, match="it has start-t1"):
        await evaluating.compare_evaluations(loop.stack, evaluated.run_id, f"{evaluated.run_id}:end-t1")


async def test_an_endpoint_is_evaluated_by_the_same_agents_boxes_and_graders(evaluated: Evaluated, loop: Loop) -> None:
    """It refuses the first calls, which are made again, and its rollouts have verdicts and no tokens."""
    with ChatEngine([refuses(429), refuses(503), refuses(503), says("I give up.")]) as server:
        endpoint = {"url": f"http://127.0.0.1:{server.port}/v1", "model": "big", "tokens": False}
        await evaluated.begin(steps=0, at=["start"], endpoint=endpoint)
        assert await loop.result(evaluated.handle) == evaluated.run_id
    found = await evaluating.read_reports(loop.stack, evaluated.run_id)
    report = found["evaluations"]["start-t1"]
    assert (report["verdicts"], report["without_verdict"], report["solved"]) == (2, 0, 2)
    assert (found["endpoint"], found["tokens_captured"]) == (endpoint, False)
    statement = select(RolloutTable.num_turns, RolloutTable.num_chains, RolloutTable.num_trained_tokens)
    async with loop.database.begin() as connection:
        rows = list(await connection.execute(statement.where(RolloutTable.run_id == evaluated.run_id)))
    assert [tuple(row) for row in rows] == [(1, 0, 0)] * 2


async def test_an_open_run_is_evaluated_at_its_next_step_boundary(evaluated: Evaluated, loop: Loop) -> None:
    await evaluated.begin(steps=1, at=[])
    await evaluated.working(2, Purpose.TRAIN)
    said: list[str] = []
    settings = EvaluationSettings(temperatures=(0.5,), samples=2)

    asking = asyncio.create_task(evaluating.run_evaluation(loop.stack, evaluated.run_id, settings, "anna", said.append))
    await evaluated.working(2)
    status = await evaluated.handle.query("state")
    assert status["waits_for"].startswith("asked1-t0.5, groups") and status["num_open_groups"] >= 1
    await loop.release(evaluated.run_id)
    found = (await asyncio.wait_for(asking, 240))["evaluations"]
    assert list(found) == ["asked1-t0.5"] and found["asked1-t0.5"]["step"] == 0
    assert found["asked1-t0.5"]["pass_at_k"]["2"]["mean"] == 1.0
    assert "asked1-t0.5" in said[0]
    for step in (0, 3):
        with pytest.raises(ConfigError, match="evaluates it at its next step boundary"):
            await evaluating.run_evaluation(loop.stack, f"{evaluated.run_id}@{step}", settings, "anna", said.append)


async def test_a_steps_rollouts_run_beside_the_evaluation_of_its_version(evaluated: Evaluated, loop: Loop) -> None:
    await evaluated.begin(steps=1, at=["start"])
    await asyncio.gather(evaluated.working(2), evaluated.working(2, Purpose.TRAIN))
    status = await evaluated.handle.query("state")
    assert status["waits_for"].startswith("start-t1, groups")
    await evaluated.handle.cancel()
    with contextlib.suppress(WorkflowFailureError):
        await loop.result(evaluated.handle)
    evaluation = loop.client.get_workflow_handle(f"evaluate/{evaluated.run_id}/start-t1")
    assert (await evaluation.describe()).status is WorkflowExecutionStatus.CANCELED
    assert await evaluated.state() == "cancelled"


async def test_a_run_of_zero_steps_without_a_temperature_only_gives_engines_its_weights(
    evaluated: Evaluated, loop: Loop
) -> None:
    """As `ratchet chat RUN@STEP` asks for it."""
    nothing = EvaluationSettings(temperatures=())
    path = loop.dataset(**TASK, eval_cmd="true")
    values = {"model": str(loop.model), "datasets": [{"path": path}], "evaluation": {"start_temperatures": [0.5]}}
    config = evaluating.evaluation_config(resolve_config(values, "the test", loop.home), nothing)
    argument = {"config": config.model_dump(mode="json")}
    await loop.client.start_workflow("TrainRun", argument, id=evaluated.handle.id, task_queue="control")
    assert await loop.result(evaluated.handle) == evaluated.run_id
    assert (await evaluated.state(), await evaluated.rollouts()) == ("done", [])
    assert (await evaluating.read_reports(loop.stack, evaluated.run_id))["evaluations"] == {}


async def test_a_fork_does_again_what_came_before_a_turn(evaluated: Evaluated, loop: Loop) -> None:
    """The first command runs again in the fork's box, without a call of the engine, and its file is in the patch."""
    await evaluated.begin(steps=0, at=["start"], evaluation={"at": ["start"], "temperatures": [1.0], "samples": 1})
    await loop.forget_script()
    await loop.script(call("date; echo two > a.txt"), "Done.")
    assert await loop.result(evaluated.handle) == evaluated.run_id
    (source,) = await evaluated.rollouts()
    evaluated.dataset.unlink()  # the task is in the store
    config, point = await evaluating.fork_config(loop.stack, str(source.id), 2, None, EvaluationSettings(samples=2))
    assert (config.init_from, point.rollout_id) == (f"{evaluated.run_id}@0", source.id)
    with pytest.raises(ConfigError, match="has no weights of step 9"):
        await evaluating.fork_config(loop.stack, str(source.id), 2, f"{evaluated.run_id}@9", EvaluationSettings())
    with pytest.raises(ConfigError, match="has no turn 3; it has turns 1 to 2"):
        await evaluating.fork_config(loop.stack, str(source.id), 3, None, EvaluationSettings())

    forked = Evaluated(loop)
    await loop.script("I stop here.", "I stop there.")
    argument = {"config": config.model_dump(mode="json")}
    await loop.client.start_workflow("TrainRun", argument, id=forked.handle.id, task_queue="control")
    assert await loop.result(forked.handle) == forked.run_id
    members = await forked.rollouts()
    assert [row.outcome for row in members] == ["graded"] * 2
    async with loop.database.begin() as connection:
        for row in members:
            story = await describe_rollout(connection, row.id)
            assert "+two" in story["patches"][0]["diff"]
            assert (story["rollout"]["forked_from"], story["rollout"]["num_trained_tokens"] > 0) == (source.id, True)
            assert [turn["logprobs_valid"] for turn in story["turns"]] == [False, True]
        (fork,) = (await describe_rollout(connection, source.id))["forks"]
        assert (fork["run_id"], fork["num_whole"], fork["num_verdicts"]) == (forked.run_id, 2, 2)

    other = loop.home / "other-tokenizer"
    shutil.copytree(loop.model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].pop()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config, _ = await evaluating.fork_config(loop.stack, str(source.id), 2, str(other), EvaluationSettings())
    refused = loop.client.get_workflow_handle(f"run/refused-{uuid4().hex[:8]}")
    argument = {"config": config.model_dump(mode="json")}
    await loop.client.start_workflow("TrainRun", argument, id=refused.id, task_queue="control")
    with pytest.raises(WorkflowFailureError) as found:
        await loop.result(refused)
    assert isinstance(found.value.cause, ActivityError)
    assert "has another tokenizer or template than" in str(found.value.cause.cause)
