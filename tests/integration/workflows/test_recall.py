"""A recall with the real grader: patches are graded again by the mended dataset, and another run trains their step."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from client.session import Client, Run
from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import GroupState, RunState
from reads.recall import retrained_runs
from store import plans, runs
from store.schema import BatchItemTable, BatchTable, GradeTable, RolloutGroupTable, RolloutTable, RunTable
from tests.integration.workflows.conftest import ROOT, Loop
from tests.integration.workflows.test_fork_training import in_flight, planned
from tests.integration.workflows.test_groups import Training
from tests.integration.workflows.test_rollout import call
from training.planner import plan_step

pytestmark = pytest.mark.timeout(600)
FIX, DONE = call("echo right > a.txt"), "Done."


@pytest.fixture
async def faulty(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Training]:
    """A run that has ended with one trained step, of a rollout that solves its task and one that does not; its tests
    said the opposite, and are mended in its dataset since.
    """
    for name in ("RATCHET_TEMPORAL_CONFIG", "RATCHET_DATABASE_URL", "TEMPORAL_ADDRESS"):
        if name in loop.environment:
            monkeypatch.setenv(name, loop.environment[name])
    training = Training(loop)
    await training.begin(FIX, "I give up.", eval_cmd='test "$(cat a.txt)" != right', max_staleness=0)
    await loop.until(lambda: in_flight(training, 2), "both agents have asked")
    await loop.script(DONE)
    await training.let_go()
    await loop.until(lambda: planned(training), "a step is planned")
    await training.cancel()
    async with loop.database.begin() as connection:
        of_run = update(BatchTable).where(BatchTable.run_id == training.run_id)
        await connection.execute(of_run.values(state="committed"))
    dataset = await dataset_of(training)
    dataset.write_text(dataset.read_text().replace("!=", "="))
    yield training
    async with loop.database.begin() as connection:  # the next test's run is refused beside one that is open again
        still_open = update(RunTable).where(RunTable.run_id == training.run_id, RunTable.state == RunState.RUNNING)
        await connection.execute(still_open.values(state=RunState.STOPPED))


async def dataset_of(training: Training) -> Path:
    async with training.loop.database.begin() as connection:
        row = await runs.the_run(connection, training.run_id)
    return Path(row.resolved_config.datasets[0].path)


async def rewards(loop: Loop, run_id: str) -> dict[int, tuple[float, float]]:
    """Return rollout -> reward and advantage of the run's first plan row."""
    async with loop.database.begin() as connection:
        row = await plans.get_plan(connection, run_id, 1)
    assert row is not None
    return {one["rollout_id"]: (one["reward"], one["advantage"]) for one in row.members}


def opposite(of: dict[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    return {rollout_id: (1 - reward, -advantage) for rollout_id, (reward, advantage) in of.items()}


async def number_of(loop: Loop, counted: Any) -> int:
    async with loop.database.begin() as connection:
        return int((await connection.execute(counted)).scalar_one())


async def test_a_recall_that_is_killed_goes_on_and_its_verdicts_are_trained(faulty: Training, loop: Loop) -> None:
    """The command is killed while patches are graded, and once the new run is there, and is given again. The run keeps
    what it trained; the new one has planned the same step with the truth, and has sampled nothing.
    """
    run_id, before = faulty.run_id, await rewards(loop, faulty.run_id)
    of_run = select(RolloutTable.id).where(RolloutTable.run_id == run_id)
    graded = select(func.count()).select_from(GradeTable).where(GradeTable.rollout_id.in_(of_run))
    retrained = num_retrained(run_id)
    command = [sys.executable, "-m", "cli.main", "recall", run_id, "--task", "task", "--apply"]
    for counted, number in ((graded, 2), (retrained, 0)):
        with subprocess.Popen(command, env=loop.environment, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
            await loop.until(lambda counted=counted, number=number: more_than(loop, counted, number), "it is at work")
            process.kill()
    client, said = Client(loop.home), list[str]()
    of = client.run(run_id)
    new = await asyncio.to_thread(of.apply_recall, of.recall(task="task"), said.append)
    assert new is not None and "is of this recall" in said[0]
    try:
        assert await number_of(loop, retrained) == 1
        assert await number_of(loop, graded) in (4, 6), "once each, or twice if the first workflow had ended before"
        assert await rewards(loop, run_id) == before, "the run keeps what it trained"
        truth = opposite(before)
        assert await rewards(loop, new.run_id) == truth
        config = new.row().resolved_config
        assert (config.init_from, config.training.steps, config.evaluation.at) == (f"{run_id}@0", 1, [])
        sampled = select(func.count()).select_from(RolloutTable).where(RolloutTable.run_id == new.run_id)
        assert await number_of(loop, sampled) == 0
        async with loop.database.begin() as connection:
            lines = [await retrained_runs(connection, one) for one in (run_id, new.run_id)]
        assert lines[0] == lines[1] and "1 groups of" in lines[0][0] and ", 1 with other rewards" in lines[0][0]
    finally:
        await cancel(loop, new)
    await a_second_mend_is_recalled_in_the_new_run(faulty, new, truth)


async def a_second_mend_is_recalled_in_the_new_run(
    faulty: Training, first: Run, truth: dict[int, tuple[float, float]]
) -> None:
    """The rollouts of the source are graded again for the second new run, too, by tests that are mended again. A recall
    of the source then names the second one.
    """
    dataset, said = await dataset_of(faulty), list[str]()
    dataset.write_text(dataset.read_text().replace("(test", "(true && test"))
    found = first.recall(task="task")
    assert (found.num_rollouts, found.first_step, len(found.to_grade)) == (2, 1, 1)
    second = await asyncio.to_thread(first.apply_recall, found, said.append)
    assert said[0] == "the datasets have other tests for 1 of 1 tasks"
    assert second is not None and second.run_id != first.run_id
    try:
        assert await rewards(faulty.loop, second.run_id) == truth
        assert second.row().resolved_config.init_from == f"{first.run_id}@0"
        source = first.client.run(faulty.run_id)
        named = await asyncio.to_thread(source.apply_recall, source.recall(task="task"), said.append)
        assert (
            named is not None
            and named.run_id == second.run_id
            and f"`ratchet recall {second.run_id} --task task`" in said[-1]
        )
    finally:
        await cancel(faulty.loop, second)


def num_retrained(run_id: str) -> Any:
    again = RunTable.config["retrain"].as_boolean() & RunTable.init_from.startswith(run_id)
    return select(func.count()).select_from(RunTable).where(again)


async def test_patches_without_a_verdict_start_no_run(faulty: Training, loop: Loop) -> None:
    """Their earlier verdicts stay in force. Once the tests decide, the same command goes on."""
    run_id, before = faulty.run_id, await rewards(loop, faulty.run_id)
    of_run = RolloutTable.run_id == run_id
    verdicts = select(RolloutTable.id, RolloutTable.grade_id, RolloutTable.reward, RolloutTable.outcome).where(of_run)
    async with loop.database.begin() as connection:
        in_force = set(map(tuple, await connection.execute(verdicts)))
    dataset, said = await dataset_of(faulty), list[str]()
    mended = dataset.read_text()
    row = json.loads(mended)
    dataset.write_text(json.dumps(row | {"metadata": row["metadata"] | {"tests_archive": "no base64!"}}) + "\n")
    of = Client(loop.home).run(run_id)
    with pytest.raises(ConfigError, match=r"^2 patches got no verdict; mend tests or grader, then give this command"):
        await asyncio.to_thread(of.apply_recall, of.recall(task="task"), said.append)
    assert said[-1] == f"{run_id}: of 2 verdicts, 0 changed, 2 missing"
    assert await number_of(loop, num_retrained(run_id)) == 0 and await rewards(loop, run_id) == before
    async with loop.database.begin() as connection:
        assert set(map(tuple, await connection.execute(verdicts))) == in_force
    dataset.write_text(mended)
    new = await asyncio.to_thread(of.apply_recall, of.recall(task="task"))
    assert new is not None
    try:
        assert await rewards(loop, new.run_id) == opposite(before)
    finally:
        await cancel(loop, new)


async def reopen(loop: Loop, run_id: str) -> RunConfig:
    """Let the run be open, with its group ready and no step planned; return its config."""
    async with loop.database.begin() as connection:
        await connection.execute(delete(BatchItemTable).where(BatchItemTable.run_id == run_id))
        await connection.execute(delete(BatchTable).where(BatchTable.run_id == run_id))
        is_ready = update(RolloutGroupTable).where(RolloutGroupTable.run_id == run_id)
        await connection.execute(is_ready.where(RolloutGroupTable.state == GroupState.CONSUMED).values(state="ready"))
        going = update(RunTable).where(RunTable.run_id == run_id)
        await connection.execute(going.values(state=RunState.RUNNING, ended_at=None))
        return (await runs.the_run(connection, run_id)).resolved_config


async def recall_and_plan(loop: Loop, run_id: str, config: RunConfig, planned_at: str) -> tuple[Run | None, list[str]]:
    """Recall the task of the open run, none of whose steps is touched; step 1 is planned as the command says a line
    that begins with `planned_at`. Return the new run and what was said.
    """

    async def answer(line: str) -> None:
        async with loop.database.begin() as connection:
            if line.startswith(planned_at) and await plans.newest_planned_step(connection, run_id) == 0:
                assert await plan_step(connection, run_id, config) == 1
                of_run = update(BatchTable).where(BatchTable.run_id == run_id)
                await connection.execute(of_run.values(state="committed"))
            if "ends after step 1" in line:
                going = update(RunTable).where(RunTable.run_id == run_id)
                await connection.execute(going.values(state=RunState.STOPPED))

    def say(line: str) -> None:
        said.append(line)
        asyncio.run_coroutine_threadsafe(answer(line), here).result(60)

    here, said = asyncio.get_running_loop(), list[str]()
    of = Client(loop.home).run(run_id)
    found = of.recall(task="task")
    assert (found.num_rollouts, found.num_steps) == (2, 0)
    return await asyncio.to_thread(of.apply_recall, found, say), said


async def test_a_step_that_is_planned_while_patches_are_graded_is_recalled(faulty: Training, loop: Loop) -> None:
    """The run is open, and none of its steps is touched until it plans one by the verdicts that are wrong."""
    run_id, before = faulty.run_id, await rewards(loop, faulty.run_id)
    new, said = await recall_and_plan(loop, run_id, await reopen(loop, run_id), "workflow ")
    assert new is not None and "step 1 was planned with these rollouts meanwhile" in said
    try:
        assert await rewards(loop, run_id) == before, "it was planned before the new verdicts"
        assert await rewards(loop, new.run_id) == opposite(before)
    finally:
        await cancel(loop, new)


async def test_a_step_that_is_planned_by_the_new_verdicts_is_left_alone(faulty: Training, loop: Loop) -> None:
    run_id, before = faulty.run_id, await rewards(loop, faulty.run_id)
    new, said = await recall_and_plan(loop, run_id, await reopen(loop, run_id), f"{run_id}: of 2 verdicts, 2 changed")
    assert new is None and said[-1] == f"no step is touched: run {run_id} keeps the tests that it began with"
    assert await rewards(loop, run_id) == opposite(before)
    async with loop.database.begin() as connection:
        assert (await runs.the_run(connection, run_id)).state == RunState.RUNNING
    assert await number_of(loop, num_retrained(run_id)) == 0


async def cancel(loop: Loop, run: Run) -> None:
    handle = loop.client.get_workflow_handle(f"run/{run.run_id}")
    await handle.cancel()

    async def has_ended() -> bool:
        return run.row().state == RunState.CANCELLED

    await loop.until(has_ended, "the run is cancelled")


async def more_than(loop: Loop, counted: Any, number: int) -> bool:
    return await number_of(loop, counted) > number
