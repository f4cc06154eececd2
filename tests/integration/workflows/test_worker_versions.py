"""Workers of two versions side by side on the stack's own Temporal server: a run and a rollout go over in mid-run.

The workflows are real; the activities are stand-ins that count which version has run them.
"""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from activities.stage import activity_stage, heartbeating
from ratchet import worker_versions
from ratchet.errors import MachineError
from ratchet.payloads import (
    EngineList,
    PrepareRunInput,
    RolloutInput,
    RunInput,
    RunPlan,
    RunView,
    TrainRunInput,
    ViewRunInput,
)
from ratchet.temporal_settings import TemporalSettings, load_temporal_settings
from ratchet.types import Outcome, RunState, Wish
from tests.integration.workflows.test_lost_tries import Stages
from tests.temporal_services import TemporalServices, own_server, services
from workflows.rollout import Rollout
from workflows.train_run import TrainRun

__all__ = ["own_server", "services"]
pytestmark = pytest.mark.timeout(1500)  # with the build of Temporal's server


class Version:
    """The worker of one version. A grade waits until `may_grade` is set."""

    def __init__(self, build: str) -> None:
        self.build = build
        self.may_grade = asyncio.Event()
        self.stages = Stages({"grade": [self._wait]})
        self.looks = 0

    async def _wait(self) -> None:
        async with heartbeating():
            await self.may_grade.wait()

    @activity_stage("prepare_run")
    async def prepare_run(self, input: PrepareRunInput) -> RunPlan:
        stages = load_temporal_settings().all_stages(60, 60)
        return RunPlan(
            run_id=input.run_id,
            stages={name: stage.model_copy(update={"queue": ""}) for name, stage in stages.items()},
            poll_seconds=0.2,
            steps_per_execution=20,
            summary="",
        )

    @activity_stage("view_run")
    async def advance_run(self, input: ViewRunInput) -> RunView:
        self.looks += 1
        return RunView(
            step=0, open_groups=[], plannable=False, wish=Wish.NONE, evaluations_ended=[], state=RunState.PAUSED,
            last_step=1, num_steps=1, evaluations=[],
        )  # fmt: skip

    @activity_stage("learn.engines")
    async def find_engines(self, input: RunInput) -> EngineList:
        return EngineList(engine_ids=[])

    def worker(self, client: Client, settings: TemporalSettings) -> Worker:
        return Worker(
            client,
            task_queue="control",
            workflows=[Rollout, TrainRun],
            activities=[*self.stages.activities(), self.prepare_run, self.advance_run, self.find_engines],
            deployment_config=worker_versions.worker_deployment(settings, self.build),
        )

    async def until_it_looks(self) -> None:
        before = self.looks
        async with asyncio.timeout(60):
            while self.looks < before + 2:
                await asyncio.sleep(0.05)


async def test_a_run_goes_over_to_the_version_that_is_made_current(own_server: TemporalServices) -> None:
    client = await own_server.client()
    settings = own_server.settings.model_copy(update={"worker_versioning": True})
    old, new = Version("1+aaa"), Version("2+bbb")
    with pytest.raises(MachineError, match=r"--deployment-name ratchet --build-id 1\+aaa"):
        await worker_versions.make_current(client, settings, old.build, wait_seconds=0)

    async def rollout(number: int) -> Any:
        given = RolloutInput(rollout_id=number)
        return await client.start_workflow(Rollout.run, given, id=f"rollout/{number}", task_queue="control")

    before = Version("0")
    async with before.worker(client, own_server.settings):
        await client.start_workflow(TrainRun.run, TrainRunInput(run_id="r"), id="run/r", task_queue="control")
        await before.until_it_looks()
    async with old.worker(client, settings):
        assert await worker_versions.make_current(client, settings, old.build)
        assert not await worker_versions.make_current(client, settings, old.build)
        first = await rollout(1)
        await old.until_it_looks()
        async with new.worker(client, settings):
            while not old.stages.tries["grade"]:
                await asyncio.sleep(0.05)
            await old.until_it_looks()
            assert new.looks == 0, "a version that is not current gets nothing"
            assert await worker_versions.make_current(client, settings, new.build)
            await new.until_it_looks()
            new.may_grade.set()
            assert (await (await rollout(2)).result()).outcome is Outcome.GRADED
            assert (old.stages.tries["workspace"], old.stages.tries["grade"]) == (1, 1)
            old.may_grade.set()  # the activity in progress ends where it is
            assert (await first.result()).outcome is Outcome.GRADED
            assert old.stages.num_finalised == 0 and new.stages.num_finalised == 2
            looks = old.looks
            await new.until_it_looks()
            assert old.looks == looks
            assert await worker_versions.make_current(client, settings, old.build)  # taken back
            await old.until_it_looks()
    unrouted = own_server.settings
    last = Version("3+ccc")
    async with last.worker(client, unrouted):
        assert await worker_versions.make_current(client, unrouted, last.build)
        await last.until_it_looks()
        assert not await worker_versions.make_current(client, unrouted, last.build)
