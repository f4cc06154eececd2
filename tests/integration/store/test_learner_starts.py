"""Reports on a run whose learner starts: after a skipped step, an extension, and at the beginning."""

from pathlib import Path

import pytest
from sqlalchemy import func, update

from stack.parts import Stack
from stack.run_status import diagnose
from store import learner_commits, learners, plans, runs
from store.database import Database
from store.plans import PlanRow
from store.schema import LearnerTable, RunTable
from tests.integration.training.records import make_config, make_run


class Learner:
    """A run of two steps, and the row of its learner."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database = database
        self.run_id = run_id

    async def beats(self, phase: str, epoch: int = 1) -> None:
        async with self.database.begin() as connection:
            await learners.heartbeat_learner(connection, self.run_id, epoch, 1, phase, 1, {})

    async def run(self, **values: object) -> None:
        async with self.database.begin() as connection:
            await connection.execute(update(RunTable).where(RunTable.run_id == self.run_id).values(**values))

    async def starts(self) -> bool:
        async with self.database.begin() as connection:
            return await learners.is_starting(connection, self.run_id)


@pytest.fixture
async def learner(database: Database, run_id: str) -> Learner:
    await make_run(database, run_id, make_config())
    return Learner(database, run_id)


async def test_a_learner_starts_until_it_waits_for_a_plan(learner: Learner) -> None:
    assert await learner.starts(), "a run that has just begun"
    await learner.run(epoch=1)
    await learner.beats(learners.LOADING_MODEL)
    assert await learner.starts()
    await learner.beats(learners.WAITING)
    assert not await learner.starts()
    await learner.run(epoch=2)
    assert await learner.starts(), "a skipped step has fenced it"
    await learner.beats(learners.LOADING_MODEL, epoch=3)
    await learner.run(epoch=3)
    async with learner.database.begin() as connection:
        await connection.execute(update(LearnerTable).values(heartbeat_at=func.now() - func.make_interval(0, 0, 0, 1)))
    assert not await learner.starts(), "it has died, which is said by its silence"
    await learner.beats(learners.TRAINED_ALL, epoch=3)
    assert await learner.starts(), "the run was extended"
    await learner.run(state="paused")
    assert not await learner.starts(), "a paused run gets no learner"


async def test_rollouts_by_hand_wait_for_no_learner(learner: Learner) -> None:
    await learner.run(config_name=runs.ADHOC)
    assert not await learner.starts()


async def test_why_says_that_the_run_waits_for_it(
    learner: Learner, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    async with learner.database.begin() as connection:
        await plans.insert_plan(connection, learner.run_id, PlanRow(1, [], {}, [], 0))
    await learner.run(epoch=1)
    await learner.beats(learners.TRAINED_ALL)
    found = await diagnose(Stack(tmp_path), learner.run_id)
    assert found.answer.startswith("the learner: it starts anew and loads the model, a minute or more")
    assert found.answer.endswith("step 1 is planned")


async def test_why_says_that_it_has_failed_before(
    learner: Learner, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    for _ in range(2):
        async with learner.database.begin() as connection:
            lease = await learner_commits.take_lease(connection, learner.run_id)
            await learner_commits.fail_run(connection, lease, 1, "out of memory")
    found = await diagnose(Stack(tmp_path), learner.run_id)
    assert found.answer.startswith("the learner: it has failed 2 times and starts anew and loads the model")
    await learner.run(checkpoint_step=1)
    found = await diagnose(Stack(tmp_path), learner.run_id)
    assert "has failed" not in found.answer, "the checkpoint starts the count again"


async def test_a_learner_that_has_trained_all_is_not_waited_for(
    learner: Learner, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    await learner.run(epoch=1, step=6, checkpoint_step=6)
    await learner.beats(learners.TRAINED_ALL)
    async with learner.database.begin() as connection:
        await connection.execute(update(LearnerTable).values(heartbeat_at=func.now() - func.make_interval(0, 0, 0, 1)))
    found = await diagnose(Stack(tmp_path), learner.run_id)
    assert "learner" not in found.parts and found.learner.startswith("it has ended after step 1")


async def test_why_names_what_discards_a_batch_that_makes_learners_hang(
    learner: Learner, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    await learner.run(epoch=1)
    await learner.beats(learners.WAITING)
    async with learner.database.begin() as connection:
        await connection.execute(update(LearnerTable).values(heartbeat_at=func.now() - func.make_interval(0, 0, 0, 1)))
    before = await diagnose(Stack(tmp_path), learner.run_id)
    assert before.answer.startswith("learner: silent for") and "skip-step" not in before.answer
    async with learner.database.begin() as connection:
        await plans.insert_plan(connection, learner.run_id, PlanRow(1, [], {}, [], 0))
    found = await diagnose(Stack(tmp_path), learner.run_id)
    assert found.answer.startswith("learner: silent for")
    assert f"`ratchet resume {learner.run_id} --skip-step -m REASON`" in found.answer
