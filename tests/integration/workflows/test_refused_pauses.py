"""A run whose pause cannot be recorded is paused with another reason, or later; it never ends because of it.

The workflow and the server are real. The activities are those of a stand-in worker whose store refuses some pauses.
"""

from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from ratchet.payloads import (
    EndRunInput,
    EngineList,
    PauseRunInput,
    PrepareRunInput,
    RunEnded,
    RunInput,
    RunPlan,
    RunView,
    StageResult,
    SyncInput,
    TrainRunInput,
    ViewRunInput,
)
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState, Wish
from workflows.rollout_group import RolloutGroup
from workflows.train_run import TrainRun


class Store:
    """The engine refuses the first weights as often as a pause is refused, and once more. A paused run is resumed at
    the next look."""

    def __init__(self, num_refused: int) -> None:
        self.stages = load_temporal_settings().all_stages(1, 1)
        self.num_refused = num_refused
        self.state = RunState.RUNNING
        self.asked: list[str] = []
        self.ends: list[RunState] = []

    @activity.defn(name="prepare_run")
    async def prepare(self, input: PrepareRunInput) -> RunPlan:
        return RunPlan(run_id="r", stages=self.stages, poll_seconds=0.1, steps_per_execution=20, summary="")

    @activity.defn(name="view_run")
    async def advance(self, input: ViewRunInput) -> RunView:
        was_paused = self.state is RunState.PAUSED
        self.state = RunState.RUNNING
        return RunView(
            step=int(was_paused), open_groups=[], plannable=False, wish=Wish.NONE, evaluations_ended=[],
            state=self.state, reason="", last_step=1, num_steps=1, evaluations=[],
        )  # fmt: skip

    @activity.defn(name="learn.engines")
    async def engines(self, input: RunInput) -> EngineList:
        return EngineList(engine_ids=[] if self.asked and not self.num_refused else [1])

    @activity.defn(name="learn.sync")
    async def sync(self, input: SyncInput) -> StageResult:
        raise ApplicationError("the answer is no JSON: \0", type="EngineRejectedError", non_retryable=True)

    @activity.defn(name="pause_run")
    async def pause(self, input: PauseRunInput) -> StageResult:
        self.asked.append(input.reason)
        if self.num_refused:
            self.num_refused -= 1
            raise ApplicationError("invalid byte sequence", type="BugError", non_retryable=True)
        self.state = RunState.PAUSED
        return StageResult()

    @activity.defn(name="end_run")
    async def end(self, input: EndRunInput) -> RunEnded:
        self.ends.append(input.state)
        return RunEnded(ended=True)


@pytest.mark.parametrize("num_refused", [1, 3])
async def test_a_run_whose_pause_is_refused_goes_on(client: Client, num_refused: int) -> None:
    store = Store(num_refused)
    activities: list[Any] = [store.prepare, store.advance, store.pause, store.end]
    async with (
        Worker(client, task_queue="control", workflows=[TrainRun, RolloutGroup], activities=activities),
        Worker(client, task_queue="learn", activities=[store.engines, store.sync]),
    ):
        handle = await client.start_workflow(TrainRun.run, TrainRunInput(run_id="r"), id="run/r", task_queue="control")
        assert await handle.result() == "r"
    assert store.ends == [RunState.DONE], "it was neither failed nor cancelled"
    own, other = store.asked[0], store.asked[1]
    assert "learn.sync failed: the answer is no JSON" in own and "could not be stored" in other
    assert store.asked == [own, other] * ((num_refused + 1) // 2)
