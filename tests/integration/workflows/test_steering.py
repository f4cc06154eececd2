"""Requests to a run that goes on, by updates and by commands: a request acts once, or is refused with a reason.

A reset or a lost signal changes nothing, because the workflow reads Postgres.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from client import steering
from client.session import Client
from ratchet.errors import ConfigError, MachineError
from ratchet.temporal_client import root_cause
from ratchet.types import Purpose, SteeringAction
from reads.steering import list_requests
from stack.ports import free_port
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_evaluations import Evaluated, evaluated
from tests.integration.workflows.test_groups import Training
from tests.integration.workflows.test_pauses import Operator

pytestmark = pytest.mark.timeout(600)
__all__ = ["evaluated"]


class Steerer(Operator):
    """A person who steers a run of the class `Training`."""

    def __init__(self, loop: Loop, training: Training) -> None:
        super().__init__(loop, training.run_id)
        self.training = training


@pytest.fixture
async def operator(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Steerer]:
    """A run of one group of two whose agents are held."""
    for name in ("RATCHET_TEMPORAL_CONFIG", "RATCHET_DATABASE_URL", "TEMPORAL_ADDRESS"):
        if name in loop.environment:
            monkeypatch.setenv(name, loop.environment[name])
    training = Training(loop)
    await training.begin()
    await loop.until(training.working, "both agents work")
    found = Steerer(loop, training)
    yield found
    await training.let_go()
    if await found.status() is WorkflowExecutionStatus.RUNNING:
        await found.handle.cancel()
    with contextlib.suppress(WorkflowFailureError):  # the next test's run is refused beside an open one
        await loop.result(found.handle)

    async def nothing_runs() -> bool:
        return all(row.outcome is not None or row.claimed_at is None for row in await training.rows())

    await loop.until(nothing_runs, "every rollout has ended")
    await loop.forget_script()


async def update(operator: Steerer, name: str, **argument: Any) -> str:
    return str(await operator.handle.execute_update(name, {"by": "anna", **argument}))


async def audit(operator: Steerer) -> list[tuple[str, str, str]]:
    async with operator.loop.database.begin() as connection:
        rows = await list_requests(connection, operator.run_id)
    return [(row.action, row.target, row.asked_by) for row in reversed(rows)]


async def test_updates_are_recorded_and_act(operator: Steerer) -> None:
    assert "is paused" in await update(operator, "pause", reason="lunch")
    assert (await operator.row()).state_reason == "paused by anna: lunch"
    assert "paused already" in await update(operator, "pause")
    assert "goes on" in await update(operator, "resume")
    changed = await update(operator, "set", changes={"training.max_staleness": 3, "sampling.temperature": 0.5})
    assert "training.max_staleness: 1 → 3" in changed
    assert "has 5 steps now" in await update(operator, "extend", steps=4)
    row = await operator.row()
    assert (row.state, row.config["training"]["steps"], row.config["training"]["max_staleness"]) == ("running", 5, 3)
    assert await audit(operator) == [
        ("pause", "", "anna"),
        ("resume", "", "anna"),
        ("set", "training.max_staleness", "anna"),
        ("set", "sampling.temperature", "anna"),
        ("extend", "training.steps", "anna"),
    ]


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("set", {"changes": {"training.max_stalness": 3}}, "did you mean training.max_staleness"),
        ("set", {"changes": {"training.max_staleness": "much"}}, "max_staleness: .*valid integer"),
        ("set", {"changes": {"harness.name": "codex"}}, "one step would mix rollouts of different agents"),
        ("set", {"changes": {"sandbox.max_boxes": 10_000}}, "above the agent slots"),
        ("extend", {"steps": 0}, "greater than 0"),
        ("retry", {"what": "rollout/nobody/0/0"}, "there is no group or rollout"),
        ("cancel", {"what": "nobody"}, "names no group, rollout or evaluation"),
    ],
)
async def test_a_refused_update_says_why(operator: Steerer, name: str, argument: dict[str, Any], expected: str) -> None:
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await update(operator, name, **argument)
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(root_cause(refused.value))
    assert not await audit(operator)
    assert await operator.status() is WorkflowExecutionStatus.RUNNING


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("extend", [], "needs an argument, one JSON object"),
        ("set", [], "needs an argument"),
        ("cancel", [], "needs an argument"),
        ("pause", [{}, {}], "positional arguments"),
        ("retry", [[1]], "Failed decoding arguments|valid dictionary|TargetInput"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_and_nothing_stands_still(
    operator: Steerer, name: str, arguments: list[Any], expected: str
) -> None:
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await operator.handle.execute_update(name, args=arguments)
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(root_cause(refused.value))
    assert "is paused" in str(await operator.handle.execute_update("pause")), "an argument may be left out"
    assert "goes on" in str(await operator.handle.execute_update("resume"))


async def test_a_stopped_run_ends_and_is_resumed(operator: Steerer, loop: Loop) -> None:
    """No step is planned, so it ends at once, with its groups."""
    answer = await steering.steer_run(loop.stack, SteeringAction.STOP, operator.run_id, "anna", "enough")
    assert answer.changed
    assert await loop.result(operator.handle) == operator.run_id
    row = await operator.row()
    assert (row.state, row.state_reason) == ("stopped", "stopped after step 0 of 1")
    with pytest.raises(ConfigError, match=r"has ended \(stopped\)"):
        await steering.steer_run(loop.stack, SteeringAction.DRAIN, operator.run_id, "anna")
    answer = await steering.steer_run(loop.stack, SteeringAction.RESUME, operator.run_id, "anna")
    assert "stopped after step 0 of 1" in answer.text
    await operator.begins()


async def test_what_was_so_already_has_not_changed_even_if_temporal_does_not_wake_the_run(
    operator: Steerer, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_away(*_: object) -> None:
        raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")

    monkeypatch.setattr(steering, "start_train_run", is_away)
    answer = await steering.steer_run(loop.stack, SteeringAction.RESUME, operator.run_id, "anna")
    assert not answer.changed and "Temporal has not woken the run (away)" in answer.text
    await steering.steer_run(loop.stack, SteeringAction.PAUSE, operator.run_id, "anna")
    answer = await steering.steer_run(loop.stack, SteeringAction.RESUME, operator.run_id, "anna")
    assert answer.changed and "Temporal has not woken the run (away)" in answer.text


async def test_a_drained_run_ends_when_its_rollouts_have(operator: Steerer, loop: Loop) -> None:
    """The wish outlives a reset of the workflow."""
    assert "starts no new groups" in await update(operator, "drain")
    await operator.handle.terminate("a reset loses all signals and updates")
    await operator.start_workflow()
    await operator.training.let_go()
    assert await loop.result(operator.handle) == operator.run_id
    assert (await operator.row()).state_reason == "drained after step 0 of 1"
    assert [row.outcome for row in await operator.training.rows()] == ["graded", "graded"]


async def test_one_rollout_is_cancelled_and_retried(operator: Steerer, loop: Loop) -> None:
    training = operator.training
    await update(operator, "set", changes={"training.max_replacements": 0})
    await steering.steer_run(loop.stack, SteeringAction.PAUSE, operator.run_id, "anna")
    first, second = await training.rows()
    with pytest.raises(ConfigError, match="is in flight"):
        await steering.steer_target(loop.stack, SteeringAction.RETRY, str(first.id), "anna")
    assert "being cancelled" in await update(operator, "cancel", what=first.workflow_id)

    async def cancelled() -> bool:
        return (await training.rows())[0].outcome == "cancelled"

    await loop.until(cancelled, "the rollout is cancelled")
    await training.let_go()

    async def failed() -> bool:
        return await training.group_state() == "failed"

    await loop.until(failed, "the group has too few verdicts")
    with pytest.raises(ConfigError, match="has a verdict; `ratchet tasks regrade"):
        await steering.steer_target(loop.stack, SteeringAction.RETRY, str(second.id), "anna")
    await loop.script("I give up.")
    answer = await steering.steer_target(loop.stack, SteeringAction.RETRY, str(first.id), "anna")
    assert answer.changed and f"rollout/{operator.run_id}/0/2" in answer.text
    with pytest.raises(ConfigError, match="another rollout has replaced it already"):
        await steering.steer_target(loop.stack, SteeringAction.RETRY, str(first.id), "anna")
    await steering.steer_run(loop.stack, SteeringAction.RESUME, operator.run_id, "anna")

    async def ready() -> bool:
        return await training.group_state() in ("ready", "consumed")

    await loop.until(ready, "the group is ready")
    assert [row.outcome for row in (await training.rows())[:3]] == ["cancelled", "graded", "graded"]


async def test_without_temporal_nothing_is_cancelled(
    operator: Steerer, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(MachineError, match=r"Temporal at .* does not answer .*`ratchet up`"):
        await steering.steer_target(loop.stack, SteeringAction.CANCEL, f"group/{operator.run_id}/0", "anna")
    assert not await audit(operator)


async def test_a_notebook_steers_and_reads(operator: Steerer, loop: Loop) -> None:
    """The blocking calls work although an event loop runs in this thread."""
    client = Client(loop.home, by="notebook")
    run = client.run(operator.run_id)
    assert run.pause("to look").changed
    assert run.row().state == "paused" and "to look" in run.why().answer
    assert list(run.rollouts().frame()["purpose"]) == ["train", "train"]
    assert list(run.steering().frame()["asked_by"]) == ["notebook"]
    assert operator.run_id in {row["run_id"] for row in client.runs()}
    with pytest.raises(ConfigError, match="there is no run"):
        client.run("nobody")
    assert run.resume().changed


async def test_a_pending_stage_is_tried_again(operator: Steerer, loop: Loop) -> None:
    """The agent's stage begins anew and finds the agent that works; the rollout goes on."""
    rollout = (await operator.training.rows())[0]
    handle = loop.client.get_workflow_handle(rollout.workflow_id)

    async def agent_works() -> bool:
        return bool((await handle.query("state"))["stage"] == "agent")

    await loop.until(agent_works, "the agent's stage has begun")
    with pytest.raises(ConfigError, match="no stage 'grade' that is pending; there is agent"):
        await steering.retry_stage(loop.stack, str(rollout.id), "grade", "anna")
    answer = await steering.retry_stage(loop.stack, str(rollout.id), "agent", "anna")
    assert answer.text == f"{rollout.workflow_id}: agent is tried again now"
    await steering.retry_stage(loop.stack, str(rollout.id), "agent", "anna")
    assert await audit(operator) == [("retry", f"{rollout.workflow_id} agent", "anna")] * 2, "each is audited"
    await operator.training.let_go()

    async def ended() -> bool:
        return all(row.outcome == "graded" for row in (await operator.training.rows())[:2])

    await loop.until(ended, "both rollouts are graded")


async def test_a_run_that_is_paused_during_an_evaluation_starts_nothing(evaluated: Evaluated, loop: Loop) -> None:
    await evaluated.begin(steps=1, at=["start"])
    await asyncio.gather(evaluated.working(2), evaluated.working(2, Purpose.TRAIN))
    answer = await steering.steer_run(loop.stack, SteeringAction.PAUSE, evaluated.run_id, "anna")
    assert answer.changed
    await loop.release(evaluated.run_id)

    async def waits_for_a_person() -> bool:
        return bool((await evaluated.handle.query("state"))["waits_for"] == "a person")

    await loop.until(waits_for_a_person, "TrainRun has seen that the run is paused")
    events = (await evaluated.handle.fetch_history()).events
    children = [
        event.start_child_workflow_execution_initiated_event_attributes.workflow_type.name
        for event in events
        if event.HasField("start_child_workflow_execution_initiated_event_attributes")
    ]
    assert sorted(children) == ["Evaluate", "RolloutGroup"], "the group that replaces the first one has no workflow"
