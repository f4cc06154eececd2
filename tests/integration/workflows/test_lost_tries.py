"""A try that was lost because a worker, the store or the sandbox service was away is none of its box's tries.

The workflow and the server are real. The activities are those of stand-in workers: each stage that may use a box only
once is lost once and then works, and a rollout may have one box for its agent and one for its grade.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.common import SearchAttributeKey
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from activities.stage import activity_stage, heartbeating
from ratchet.errors import SandboxGoneError, StoreUnavailableError
from ratchet.payloads import (
    AgentResult,
    Claim,
    DiffResult,
    FinaliseInput,
    GradeResult,
    LiveSandbox,
    RolloutInput,
    RolloutResult,
    StageInput,
    StageResult,
)
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import SEARCH_ATTRIBUTES, AgentExit, Outcome
from workflows.rollout import Rollout

pytestmark = pytest.mark.timeout(1500)  # with the build of Temporal's CLI
KEYS = {
    "Keyword": SearchAttributeKey.for_keyword,
    "Double": SearchAttributeKey.for_float,
    "Int": SearchAttributeKey.for_int,
}
Loss = Callable[[], Awaitable[None]]


async def is_silent() -> None:
    """Send no heartbeat, like a worker that was killed."""
    await asyncio.Event().wait()


async def lost_the_store() -> None:
    raise StoreUnavailableError("Postgres does not work")


async def lost_its_box() -> None:
    raise SandboxGoneError("box 1 is released")


class Stages:
    """`lose`: what happens in the first tries of workspace and grade, by stage."""

    def __init__(self, lose: dict[str, list[Loss]]) -> None:
        self.lose = {stage: list(losses) for stage, losses in lose.items()}
        self.tries: Counter[str] = Counter()
        self.num_finalised = 0
        self.began = asyncio.Event()

    async def _use_box(self, stage: str) -> None:
        self.tries[stage] += 1
        self.began.set()
        if losses := self.lose.get(stage):
            await losses.pop(0)()

    @activity_stage("claim")
    async def claim(self, input: RolloutInput) -> Claim:
        stages = load_temporal_settings().all_stages(60, 60)
        stages = {
            name: stage.model_copy(update={"queue": "", "heartbeat_seconds": stage.heartbeat_seconds and 1})
            for name, stage in stages.items()
        }
        return Claim(
            rollout_id=1,
            run_id="r",
            group_id=1,
            task_id=1,
            attempt=1,
            agent_budget_seconds=100,
            eval_budget_seconds=100,
            guard_seconds=1000,
            box_tries=1,
            grade_tries=1,
            stages=stages,
            summary="",
        )

    @activity_stage("boot")
    async def boot(self, input: StageInput) -> LiveSandbox:
        return LiveSandbox(sandbox_id=1, provider_id="box")

    @activity_stage("workspace")
    async def workspace(self, input: StageInput) -> StageResult:
        await self._use_box("workspace")
        return StageResult()

    @activity_stage("agent")
    async def agent(self, input: StageInput) -> AgentResult:
        return AgentResult(agent_exit=AgentExit.DONE, num_turns=1)

    @activity_stage("diff")
    async def diff(self, input: StageInput) -> DiffResult:
        return DiffResult(patch_id=1, num_bytes=1)

    @activity_stage("grade")
    async def grade(self, input: StageInput) -> GradeResult:
        assert input.tries_left == 0
        await self._use_box("grade")
        return GradeResult(grade_id=1, solved=True)

    @activity_stage("release")
    async def release(self, input: StageInput) -> StageResult:
        return StageResult()

    @activity_stage("finalise")
    async def finalise(self, input: FinaliseInput) -> RolloutResult:
        self.num_finalised += 1
        reward = None if input.failure else 1.0
        return RolloutResult(rollout_id=1, outcome=Outcome(input.failure or "graded"), reward=reward)

    def activities(self) -> list[Callable[..., Any]]:
        before = [self.claim, self.boot, self.workspace, self.agent, self.diff]
        return [*before, self.grade, self.release, self.finalise]

    def worker(self, client: Client) -> Worker:
        return Worker(client, task_queue="control", workflows=[Rollout], activities=self.activities())


@pytest.fixture(scope="module")
async def client(temporal_cli: str) -> Any:
    attributes: list[Any] = [KEYS[kind](name) for name, kind in SEARCH_ATTRIBUTES.items()]
    async with await WorkflowEnvironment.start_local(
        data_converter=pydantic_data_converter, dev_server_existing_path=temporal_cli, search_attributes=attributes
    ) as server:
        yield server.client


async def play(client: Client, stages: Stages, name: str) -> Any:
    async with stages.worker(client):
        return await client.execute_workflow(Rollout.run, RolloutInput(rollout_id=1), id=name, task_queue="control")


@pytest.mark.parametrize("loss", [is_silent, lost_the_store])
async def test_a_lost_try_is_none_of_the_tries(client: Client, loss: Loss) -> None:
    stages = Stages({"workspace": [loss], "grade": [loss]})
    result = await play(client, stages, loss.__name__)
    assert (result.outcome, result.reward) == (Outcome.GRADED, 1.0)
    assert stages.tries == {"workspace": 2, "grade": 2}


async def test_a_lost_box_is_one_of_the_tries(client: Client) -> None:
    for stage, outcome in (("workspace", Outcome.INFRA_FAILED), ("grade", Outcome.GRADER_FAILED)):
        stages = Stages({stage: [lost_its_box]})
        assert (await play(client, stages, f"box of {stage}")).outcome is outcome
        assert stages.tries[stage] == 1


async def test_lost_tries_are_bounded(client: Client) -> None:
    stages = Stages({"grade": [lost_the_store] * 100})
    assert (await play(client, stages, "bounded")).outcome is Outcome.GRADER_FAILED
    assert stages.tries["grade"] == 11


async def test_a_worker_that_is_shut_down_costs_no_try(client: Client) -> None:
    async def works() -> None:
        async with heartbeating():
            await asyncio.Event().wait()

    stages = Stages({"workspace": [works]})
    start = client.start_workflow(Rollout.run, RolloutInput(rollout_id=1), id="shut down", task_queue="control")
    async with stages.worker(client):
        handle = await start
        await stages.began.wait()
    async with stages.worker(client):
        assert (await handle.result()).outcome is Outcome.GRADED
    assert stages.tries["workspace"] == 2
