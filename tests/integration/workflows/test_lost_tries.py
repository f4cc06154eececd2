"""A try that was lost because a worker, the store or the sandbox service was away is none of its box's tries. Only
boxes that suspect a patch are witnesses against it, and clean-up decides nothing.

The workflow and the server are real. The activities are those of stand-in workers: each stage that may use a box only
once is lost once and then works, and a rollout may have one box for its agent and one or more for its grade.
"""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, Worker

from activities.stage import activity_stage, heartbeating
from ratchet.errors import (
    BugError,
    GuardSpentError,
    SandboxGoneError,
    StoreUnavailableError,
    SuspectPatchError,
    TemporalUnavailableError,
)
from ratchet.grading_payloads import RegradedInput, RegradedResult, RegradeInput, RegradePage, StoredPatch
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
    StageOptions,
    StageResult,
)
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import AgentExit, Outcome, Suspicion
from workflows.regrade import Regrade
from workflows.rollout import Rollout

Loss = Callable[[], Awaitable[None]]


async def is_silent() -> None:
    """Send no heartbeat, like a worker that was killed."""
    await asyncio.Event().wait()


async def lost_the_store() -> None:
    raise StoreUnavailableError("Postgres does not work")


async def has_a_full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data")


async def lost_temporal() -> None:
    raise TemporalUnavailableError("Temporal does not describe workflows")


async def lost_its_box() -> None:
    raise SandboxGoneError("box 1 is released")


async def works() -> None:
    pass


async def has_spent_the_guard() -> None:
    raise GuardSpentError("the rollout has had boxes for 3 s more than its guard, outages not counted")


def suspects(suspicion: Suspicion) -> Loss:
    async def suspect() -> None:
        raise SuspectPatchError("no test failed", suspicion)

    return suspect


suspects_the_patch = suspects(Suspicion.KILLED)


async def has_a_bug() -> None:
    raise BugError("an answer that nothing expected")


class Stages:
    """`lose`: what happens in the first tries of stages, by stage. `suspected`: what the grades were told."""

    def __init__(self, lose: dict[str, list[Loss]], grade_tries: int = 1) -> None:
        self.lose = {stage: list(losses) for stage, losses in lose.items()}
        self.grade_tries = grade_tries
        self.retry_seconds = 0.01
        self.box_tries = 1
        self.num_control_runs = 0
        self.suspected: list[list[Suspicion]] = []
        self.agent_seconds = 0.0
        self.by_host: list[bool] = []
        self.tries: Counter[str] = Counter()
        self.num_finalised = 0
        self.began = asyncio.Event()

    async def _use_box(self, stage: str) -> None:
        self.tries[stage] += 1
        if losses := self.lose.get(stage):
            self.began.set()
            await losses.pop(0)()

    def _stages(self) -> dict[str, StageOptions]:
        stages = load_temporal_settings().all_stages(60, 60)
        stages = {
            name: stage.model_copy(update={"queue": "", "heartbeat_seconds": stage.heartbeat_seconds and 1})
            for name, stage in stages.items()
        }
        quick = {"retry_initial_seconds": self.retry_seconds, "retry_max_seconds": self.retry_seconds}
        stages |= {name: stages[name].model_copy(update=quick) for name in ("workspace", "grade")}
        return stages

    @activity_stage("claim")
    async def claim(self, input: RolloutInput) -> Claim:
        await self._use_box("claim")
        return Claim(
            rollout_id=1,
            attempt=1,
            box_tries=self.box_tries,
            grade_tries=self.grade_tries,
            stages=self._stages(),
            summary="",
        )

    @activity_stage("boot")
    async def boot(self, input: StageInput) -> LiveSandbox:
        await self._use_box(f"{input.role} boot")
        return LiveSandbox(sandbox_id=1, provider_id="box")

    @activity_stage("workspace")
    async def workspace(self, input: StageInput) -> StageResult:
        await self._use_box("workspace")
        return StageResult()

    @activity_stage("agent")
    async def agent(self, input: StageInput) -> AgentResult:
        return AgentResult(agent_exit=AgentExit.DONE, num_turns=1, used_seconds=self.agent_seconds)

    @activity_stage("diff")
    async def diff(self, input: StageInput) -> DiffResult:
        return DiffResult(patch_id=1, num_bytes=1)

    @activity_stage("grade")
    async def grade(self, input: StageInput) -> GradeResult:
        self.suspected.append(input.suspected)
        await self._use_box("grade")
        return GradeResult(grade_id=1, solved=True, num_control_runs=self.num_control_runs)

    @activity_stage("control_run")
    async def control_run(self, input: StageInput) -> GradeResult:
        await self._use_box("control_run")
        return GradeResult(grade_id=1, solved=True)

    @activity_stage("regrade_page")
    async def regrade_page(self, input: RegradeInput) -> RegradePage:
        patches = [] if input.after else [StoredPatch(1, 1, 1)]
        return RegradePage(patches=patches, stages=self._stages(), grade_tries=self.grade_tries)

    @activity_stage("settle_regrade")
    async def settle_regrade(self, input: RegradedInput) -> RegradedResult:
        graded = len(input.grade_ids)
        return RegradedResult(rollout_id=1, graded=graded, solved=graded, changed=False, adopted=False)

    @activity_stage("release")
    async def release(self, input: StageInput) -> StageResult:
        self.by_host.append(input.ended_by_host)
        await self._use_box("release")
        return StageResult()

    @activity_stage("finalise")
    async def finalise(self, input: FinaliseInput) -> RolloutResult:
        await self._use_box("finalise")
        self.num_finalised += 1
        reward = None if input.failure else 1.0
        return RolloutResult(rollout_id=1, outcome=Outcome(input.failure or "graded"), reward=reward)

    def activities(self) -> list[Callable[..., Any]]:
        before = [self.claim, self.boot, self.workspace, self.agent, self.diff]
        regrades = [self.regrade_page, self.settle_regrade]
        return [*before, self.grade, self.control_run, self.release, self.finalise, *regrades]

    def worker(self, client: Client) -> Worker:
        return Worker(client, task_queue="control", workflows=[Rollout, Regrade], activities=self.activities())


async def play(client: Client, stages: Stages, name: str) -> RolloutResult:
    async with stages.worker(client):
        try:
            return await client.execute_workflow(Rollout.run, RolloutInput(rollout_id=1), id=name, task_queue="control")
        except WorkflowFailureError as error:
            assert isinstance(error.cause, ApplicationError)
            return RolloutResult(rollout_id=1, outcome=Outcome(error.cause.type or ""), reward=None)


@pytest.mark.parametrize("loss", [is_silent, lost_the_store])
async def test_a_lost_try_is_none_of_the_tries(client: Client, loss: Loss) -> None:
    stages = Stages({"workspace": [loss], "grade": [loss]})
    result = await play(client, stages, loss.__name__)
    assert (result.outcome, result.reward) == (Outcome.GRADED, 1.0)
    assert (stages.tries["workspace"], stages.tries["grade"]) == (2, 2) and stages.suspected == [[], []]


async def _scheduled(client: Client, name: str) -> list[str]:
    """Return the activities of a workflow that are no local ones, in their order."""
    history = await client.get_workflow_handle(name).fetch_history()
    await Replayer(workflows=[Rollout], data_converter=pydantic_data_converter).replay_workflow(history)
    events = [one.activity_task_scheduled_event_attributes.activity_type.name for one in history.events]
    return [one for one in events if one]


@pytest.mark.parametrize("loss", [is_silent, lost_the_store])
async def test_a_local_activity_is_tried_once(client: Client, loss: Loss) -> None:
    """After a failure an ordinary activity follows, which Temporal shows while it waits."""
    name = f"local {loss.__name__}"
    stages = Stages({"claim": [loss], "finalise": [loss]})
    assert (await play(client, stages, name)).outcome is Outcome.GRADED
    assert (stages.tries["claim"], stages.tries["finalise"]) == (2, 2)
    scheduled = await _scheduled(client, name)
    assert scheduled[0] == "claim" and scheduled[-1] == "finalise"
    await play(client, Stages({}), f"{name}, not lost")
    assert not {"claim", "finalise"} & set(await _scheduled(client, f"{name}, not lost"))


async def test_a_rollout_that_is_cancelled_in_its_claim_gets_its_outcome(client: Client) -> None:
    stages = Stages({"claim": [is_silent]})
    async with stages.worker(client):
        handle = await client.start_workflow(Rollout.run, RolloutInput(rollout_id=1), id="early", task_queue="control")
        await stages.began.wait()
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert (stages.tries["claim"], stages.num_finalised) == (2, 1)


async def test_a_lost_box_is_one_of_the_tries(client: Client) -> None:
    for stage, outcome in (("workspace", Outcome.INFRA_FAILED), ("grade", Outcome.GRADER_FAILED)):
        stages = Stages({stage: [lost_its_box]})
        assert (await play(client, stages, f"box of {stage}")).outcome is outcome
        assert stages.tries[stage] == 1


@pytest.mark.parametrize("loss", [has_a_full_disk, lost_temporal])
async def test_a_worker_whose_machine_refuses_is_waited_for(client: Client, loss: Loss) -> None:
    """More often than lost boxes are borne; the guard of a rollout does not end it either."""
    stages = Stages({"workspace": [loss] * 12, "grade": [loss] * 12})
    result = await play(client, stages, f"host {loss.__name__}")
    assert (result.outcome, result.reward) == (Outcome.GRADED, 1.0)
    assert (stages.tries["workspace"], stages.tries["grade"]) == (13, 13)
    history = await client.get_workflow_handle(f"host {loss.__name__}").fetch_history()
    assert sum(event.HasField("timer_started_event_attributes") for event in history.events) == 24
    await Replayer(workflows=[Rollout], data_converter=pydantic_data_converter).replay_workflow(history)


async def test_control_runs_and_regrades_wait_for_a_machine_too(client: Client) -> None:
    stages = Stages({"control_run": [has_a_full_disk] * 12})
    stages.num_control_runs = 1
    assert (await play(client, stages, "control on a full disk")).outcome is Outcome.GRADED
    assert (stages.tries["grade"], stages.tries["control_run"]) == (1, 13)
    stages = Stages({"grade": [has_a_full_disk] * 12})
    async with stages.worker(client):
        result = await client.execute_workflow(
            Regrade.run, RegradeInput(rollout_id=1), id="regrade on a full disk", task_queue="control"
        )
    assert (result.rollouts, result.without_verdict) == (1, 0)
    assert (stages.tries["grade"], stages.tries["release"]) == (13, 13), "no box is kept while it waits"


async def test_boxes_that_a_full_disk_ended_are_released_as_its(client: Client) -> None:
    """So that the guard leaves their time out."""
    stages = Stages({"workspace": [has_a_full_disk, lost_its_box], "grade": [has_a_full_disk]})
    await play(client, stages, "whose fault")
    assert stages.by_host == [True, False, False]


async def test_a_rollout_that_waits_for_a_machine_can_be_cancelled(client: Client) -> None:
    stages = Stages({"grade": [has_a_full_disk]})
    stages.retry_seconds = 600
    async with stages.worker(client):
        handle = await client.start_workflow(Rollout.run, RolloutInput(rollout_id=1), id="waits", task_queue="control")
        async with asyncio.timeout(60):
            while (await handle.query(Rollout.state)).stage != "wait_for_worker":
                await asyncio.sleep(0.05)
        assert stages.tries["release"] > 0
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    assert stages.num_finalised == 1


async def test_lost_tries_are_bounded(client: Client) -> None:
    stages = Stages({"grade": [lost_the_store] * 100})
    assert (await play(client, stages, "bounded")).outcome is Outcome.GRADER_FAILED
    assert stages.tries["grade"] == 11


async def test_only_a_box_that_suspects_the_patch_is_a_witness_against_it(client: Client) -> None:
    """The word of a grade that is told of a witness is final."""
    stages = Stages({"grade": [suspects_the_patch]})
    assert (await play(client, stages, "two witnesses")).outcome is Outcome.GRADED
    assert stages.suspected == [[], [Suspicion.KILLED]], "also if a rollout has one grading box only"
    stages = Stages({"grade boot": [lost_its_box, lost_its_box]}, grade_tries=3)
    assert (await play(client, stages, "two boxes that never were")).outcome is Outcome.GRADED
    assert stages.suspected == [[]]
    stages = Stages({"grade": [lost_its_box, suspects_the_patch, lost_its_box]}, grade_tries=3)
    assert (await play(client, stages, "lost boxes are no witnesses")).outcome is Outcome.GRADED
    assert stages.suspected == [[], [], [Suspicion.KILLED], [Suspicion.KILLED]]
    stages = Stages({"grade": [lost_its_box] * 3}, grade_tries=3)
    assert (await play(client, stages, "three lost boxes")).outcome is Outcome.GRADER_FAILED
    assert stages.suspected == [[]] * 3


async def test_two_boxes_that_show_different_things_are_no_witnesses(client: Client) -> None:
    """Each way is counted by itself, and the first box that shows one takes no try away from the others."""
    ways = [Suspicion.TIMED_OUT, Suspicion.KILLED, Suspicion.NO_TEST]
    stages = Stages({"grade": [suspects(way) for way in ways]})
    assert (await play(client, stages, "three ways")).outcome is Outcome.GRADED
    assert stages.suspected == [ways[:number] for number in range(4)]


async def test_long_waits_of_the_agent_do_not_take_the_second_box_from_a_patch(client: Client) -> None:
    """`used_seconds` of the agent are the whole life of its program, waits for our engine included."""
    stages = Stages({"grade": [suspects_the_patch]}, grade_tries=3)
    stages.agent_seconds = 100_000
    assert (await play(client, stages, "a long wait")).outcome is Outcome.GRADED
    assert stages.suspected == [[], [Suspicion.KILLED]]


async def test_a_spent_guard_gives_no_verdict(client: Client) -> None:
    stages = Stages({"grade": [lost_its_box], "grade boot": [works, has_spent_the_guard]}, grade_tries=3)
    assert (await play(client, stages, "guard in grading")).outcome is Outcome.GRADER_FAILED
    stages = Stages({"workspace": [lost_its_box], "agent boot": [works, has_spent_the_guard]})
    stages.box_tries = 3
    assert (await play(client, stages, "guard in the agent")).outcome is Outcome.INFRA_FAILED
    assert stages.tries["agent boot"] == 2


async def test_boxes_that_cannot_be_released_change_no_outcome(client: Client) -> None:
    stages = Stages({"grade": [lost_its_box], "release": [has_a_bug] * 9}, grade_tries=2)
    assert (await play(client, stages, "release between tries")).outcome is Outcome.GRADED
    stages = Stages({"workspace": [lost_its_box], "release": [has_a_bug] * 9})
    assert (await play(client, stages, "release at the end")).outcome is Outcome.INFRA_FAILED
    assert stages.num_finalised == 1


async def test_a_worker_that_is_shut_down_costs_no_try(client: Client) -> None:
    async def goes_on() -> None:
        async with heartbeating():
            await asyncio.Event().wait()

    stages = Stages({"workspace": [goes_on]})
    start = client.start_workflow(Rollout.run, RolloutInput(rollout_id=1), id="shut down", task_queue="control")
    async with stages.worker(client):
        handle = await start
        await stages.began.wait()
    async with stages.worker(client):
        assert (await handle.result()).outcome is Outcome.GRADED
    assert stages.tries["workspace"] == 2
