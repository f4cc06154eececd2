"""TrainRun makes new groups while the learner works.

The workflow and the server are real. The activities are those of a stand-in worker whose learner works until a group
has been started that was made after its step had begun.
"""

import asyncio
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from ratchet.payloads import (
    EndRunInput,
    EngineList,
    GroupInput,
    GroupPlan,
    LearnedStep,
    Planned,
    PrepareRunInput,
    RunEnded,
    RunInput,
    RunningGroups,
    RunPlan,
    RunView,
    StartedGroup,
    StepInput,
    TrainRunInput,
    ViewRunInput,
)
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState, Wish
from workflows.rollout_group import RolloutGroup
from workflows.train_run import TrainRun


class Learner:
    """The first look finds a step to plan; a second group is there from the third look on, during the step."""

    def __init__(self) -> None:
        self.stages = load_temporal_settings().all_stages(1, 1)
        self.num_looks = 0
        self.trained = False
        self.started: set[int] = set()
        self.second_started = asyncio.Event()

    @activity.defn(name="prepare_run")
    async def prepare(self, input: PrepareRunInput) -> RunPlan:
        return RunPlan(run_id="r", stages=self.stages, poll_seconds=1.0, steps_per_execution=20, summary="")

    @activity.defn(name="view_run")
    async def advance(self, input: ViewRunInput) -> RunView:
        self.num_looks += 1
        numbers = [] if self.trained else [1] if self.num_looks < 3 else [1, 2]
        groups = [
            StartedGroup(group_id=number, workflow_id=f"group/r/{number}", task="t", harness="h", step=0)
            for number in numbers
        ]
        return RunView(
            step=int(self.trained), open_groups=groups, plannable=not self.trained, wish=Wish.NONE,
            evaluations_ended=[], state=RunState.RUNNING, reason="", last_step=1, num_steps=1, evaluations=[],
        )  # fmt: skip

    @activity.defn(name="find_running_groups")
    async def find(self, input: RunInput) -> RunningGroups:
        return RunningGroups(workflow_ids=[])

    @activity.defn(name="plan_group")
    async def plan_group(self, input: GroupInput) -> GroupPlan:
        self.started.add(input.group_id)
        if input.group_id == 2:
            self.second_started.set()
        raise asyncio.CancelledError  # its members do not matter here

    @activity.defn(name="learn.plan")
    async def plan(self, input: RunInput) -> Planned:
        return Planned(step=1)

    @activity.defn(name="learn.step")
    async def step(self, input: StepInput) -> LearnedStep:
        async with asyncio.timeout(120):
            await self.second_started.wait()
        self.trained = True
        return LearnedStep()

    @activity.defn(name="learn.engines")
    async def engines(self, input: RunInput) -> EngineList:
        return EngineList(engine_ids=[])

    @activity.defn(name="end_run")
    async def end(self, input: EndRunInput) -> RunEnded:
        return RunEnded(ended=True)


async def test_a_group_that_is_made_during_a_step_is_started_during_it(client: Client) -> None:
    learner = Learner()
    activities: list[Any] = [
        *(learner.prepare, learner.advance, learner.find, learner.plan_group, learner.plan),
        *(learner.step, learner.engines, learner.end),
    ]
    async with (
        Worker(client, task_queue="control", workflows=[TrainRun, RolloutGroup], activities=activities),
        Worker(client, task_queue="learn", activities=[learner.step, learner.engines]),
    ):
        handle = await client.start_workflow(TrainRun.run, TrainRunInput(run_id="r"), id="run/r", task_queue="control")
        assert await handle.result() == "r"
    assert learner.started == {1, 2}
