"""The best step of a run, which keeps its weights and checkpoint, and the report of an evaluation."""

import pytest
from sqlalchemy import insert, select, update

from activities.evaluations import EvaluationActivities
from activities.run_configs import RunConfigs
from ratchet.errors import ConfigError
from ratchet.evaluation_payloads import EvaluateInput
from ratchet.payloads import EvaluationPlan
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import Purpose, RunState
from reads.evaluation_report import evaluated_tasks, find_evaluation, report_evaluation
from reads.evaluations import evaluation_rates
from reads.runs import list_run_summaries
from store import evaluations, groups, learner_commits, retention, runs, steering
from store.database import Database
from store.evaluations import NewEvaluation
from store.groups import NewGroup
from store.learner_commits import RunLease
from store.runs import OrderedTask
from store.schema import GradeTable, PatchTable, RolloutGroupTable, RolloutTable, RunTable, TaskTable
from store.steering import Request
from tests.integration.training.records import make_config, make_run

NUM_TASKS = 4


class Evaluations:
    """A run whose evaluations are rows: every task has one rollout per evaluation."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database = database
        self.run_id = run_id
        self.tasks: list[int] = []

    async def make(self) -> None:
        await make_run(self.database, self.run_id, make_config())
        async with self.database.begin() as connection:
            for number in range(NUM_TASKS):
                task = {
                    "dataset": f"d{number % 2}",
                    "dataset_digest": self.run_id,
                    "row_digest": f"{self.run_id}{number}",
                }
                task |= {"row_no": number, "label": str(number), "image": "host", "workdir": "/w", "grader": "g"}
                row = insert(TaskTable).values(**task, spec={"family": "f"} if number else {}).returning(TaskTable.id)
                self.tasks.append((await connection.execute(row)).scalar_one())
            await runs.set_task_order(
                connection, self.run_id, Purpose.EVAL, [OrderedTask(one, 0) for one in self.tasks]
            )

    async def evaluate(
        self,
        step: int,
        solved: int,
        verdicts: int = NUM_TASKS,
        label: str = "",
        temperature: float = 1.0,
        ended: bool = True,
    ) -> None:
        """Of the `verdicts` rollouts that have one, the first `solved` are solved."""
        label = label or f"step{step}-t{temperature:g}"
        async with self.database.begin() as connection:
            row = NewEvaluation(self.run_id, label, step, temperature, 1, f"{self.run_id}/{step}.e0")
            await evaluations.begin_evaluation(connection, row)
            first = await runs.take_group_numbers(connection, self.run_id, NUM_TASKS)
            new = [
                NewGroup(self.run_id, first + n, task, Purpose.EVAL, 1, 1, temperature, step, f"{label}/{n}", label)
                for n, task in enumerate(self.tasks)
            ]
            made = await groups.create_groups(connection, new, "bash_agent")
            for number, group in enumerate(made[:verdicts]):
                mine = select(RolloutTable.id).where(RolloutTable.group_id == group)
                rollout_id = (await connection.execute(mine)).scalar_one()
                patch = {
                    "rollout_id": rollout_id,
                    "attempt": 1,
                    "diff": b"",
                    "num_bytes": 0,
                    "num_files": 0,
                    "base_commit": "c",
                }
                patch_id = (
                    await connection.execute(insert(PatchTable).values(**patch).returning(PatchTable.id))
                ).scalar_one()
                grade = {"rollout_id": rollout_id, "patch_id": patch_id, "grader": "g", "grader_version": "1"}
                grade |= {
                    "solved": number < solved,
                    "rejected": False,
                    "reason": "",
                    "log": b"",
                    "duration_seconds": 1.0,
                }
                grade_id = (
                    await connection.execute(insert(GradeTable).values(**grade).returning(GradeTable.id))
                ).scalar_one()
                verdict = {"outcome": "graded", "reward": float(number < solved), "grade_id": grade_id}
                await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout_id).values(**verdict))
            if ended:
                await evaluations.end_evaluation(connection, self.run_id, label)

    async def best(self) -> tuple[int | None, float | None]:
        async with self.database.begin() as connection:
            columns = select(RunTable.best_step, RunTable.best_rate).where(RunTable.run_id == self.run_id)
            return tuple((await connection.execute(columns)).one())  # type: ignore[return-value]


@pytest.fixture
async def evaluated(database: Database, run_id: str) -> Evaluations:
    found = Evaluations(database, run_id)
    await found.make()
    return found


async def test_the_first_of_the_best_steps_is_kept(evaluated: Evaluations) -> None:
    await evaluated.evaluate(0, solved=1)
    assert await evaluated.best() == (0, 0.25)
    await evaluated.evaluate(2, solved=3)
    await evaluated.evaluate(4, solved=3)
    await evaluated.evaluate(6, solved=2)
    assert await evaluated.best() == (2, 0.75)


async def test_only_the_first_temperature_decides_which_step_is_the_best(evaluated: Evaluations) -> None:
    """It is read when an evaluation ends, and all ended evaluations are then compared by it."""
    await evaluated.evaluate(2, solved=2)
    await evaluated.evaluate(4, solved=4, temperature=0.5)
    assert await evaluated.best() == (2, 0.5)
    async with evaluated.database.begin() as connection:
        changes = {"evaluation.temperatures": [0.5]}
        await steering.record_changes(connection, Request(evaluated.run_id, "1", "anna"), changes)
    await evaluated.evaluate(6, solved=3, temperature=0.5)
    assert await evaluated.best() == (4, 1.0)


async def test_verdicts_that_change_may_make_another_step_the_best(evaluated: Evaluations) -> None:
    await evaluated.evaluate(2, solved=3)
    await evaluated.evaluate(4, solved=4)
    async with evaluated.database.begin() as connection:
        mine = select(RolloutGroupTable.id).where(RolloutGroupTable.label == "step4-t1")
        regraded = update(RolloutTable).where(RolloutTable.group_id.in_(mine))
        await connection.execute(regraded.values(reward=0.0))
    await evaluated.evaluate(6, solved=1)
    assert await evaluated.best() == (2, 0.75)


async def test_the_best_step_is_listed(evaluated: Evaluations) -> None:
    await evaluated.evaluate(2, solved=3)
    async with evaluated.database.begin() as connection:
        row = await runs.get_run(connection, evaluated.run_id)
        (listed,) = await list_run_summaries(connection)
    assert row is not None and (row.best_step, row.best_rate) == (2, 0.75)
    assert (listed.best_step, listed.best_rate) == (2, 0.75)


async def test_an_evaluation_that_has_not_ended_is_not_compared(evaluated: Evaluations) -> None:
    run_id = evaluated.run_id
    async with evaluated.database.begin() as connection:
        with pytest.raises(ConfigError, match="has no evaluation; `ratchet evaluate"):
            await find_evaluation(connection, run_id, None)
    await evaluated.evaluate(2, solved=1, verdicts=1, ended=False)
    async with evaluated.database.begin() as connection:
        for label in (None, "step2-t1"):
            with pytest.raises(ConfigError, match=f"evaluation step2-t1 of run {run_id} has not ended"):
                await find_evaluation(connection, run_id, label)
    await evaluated.evaluate(0, solved=1)
    await evaluated.evaluate(4, solved=1, verdicts=1, ended=False)
    async with evaluated.database.begin() as connection:
        assert await find_evaluation(connection, run_id, None) == "step0-t1"
        with pytest.raises(ConfigError, match="it has step2-t1, step0-t1, step4-t1"):
            await find_evaluation(connection, run_id, "step6-t1")


async def test_the_members_without_a_reward_come_in_pages(
    evaluated: Evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.evaluations.MEMBERS_PER_EXECUTION", 2)
    await evaluated.evaluate(0, solved=0, verdicts=1, ended=False)
    async with evaluated.database.begin() as connection:
        await runs.publish_initial(connection, f"{evaluated.run_id}/0.e0", evaluated.run_id, "w", [])
    settings = load_temporal_settings()
    activities = EvaluationActivities(evaluated.database, settings, RunConfigs(evaluated.database, settings))
    plan = EvaluationPlan(label="step0-t1", step=0, temperature=1.0, num_samples=1)

    async def begin(after: int) -> tuple[list[int], bool]:
        asked = EvaluateInput(run_id=evaluated.run_id, evaluation=plan, after=after)
        found = await activities.begin_evaluation(asked)
        return [member.rollout_id for member in found.members], found.more

    members, more = await begin(0)
    assert len(members) == 2 and more
    (last,), more = await begin(members[1])
    assert last not in members and not more
    assert await begin(last) == ([], False)


async def test_an_evaluation_leaves_the_open_rollouts_to_the_step_beside_it(evaluated: Evaluations) -> None:
    async with evaluated.database.begin() as connection:
        await runs.publish_initial(connection, f"{evaluated.run_id}/0.e0", evaluated.run_id, "w", [])
    settings = load_temporal_settings()
    activities = EvaluationActivities(evaluated.database, settings, RunConfigs(evaluated.database, settings))
    plan = EvaluationPlan(label="step0-t1", step=0, temperature=1.0, num_samples=1)
    limits = (await activities.configs.of_run(evaluated.run_id)).sandbox

    async def window(num_open: int) -> int:
        if num_open:
            async with evaluated.database.begin() as connection:
                number = await runs.take_group_numbers(connection, evaluated.run_id, 1)
                values = (Purpose.TRAIN, num_open, 1, 1.0, 0, f"{evaluated.run_id}/{number}")
                group = NewGroup(evaluated.run_id, number, evaluated.tasks[0], *values)
                await groups.create_groups(connection, [group], "bash_agent")
        asked = EvaluateInput(run_id=evaluated.run_id, evaluation=plan)
        return (await activities.begin_evaluation(asked)).window

    assert await window(0) == limits.max_open_rollouts
    assert await window(3) == limits.max_open_rollouts - 3
    assert await window(limits.max_open_rollouts) == limits.max_boxes


async def test_what_is_asked_already_is_evaluated_once(evaluated: Evaluations) -> None:
    """A repetition of a command, on a paused run for example, gets the same evaluation."""

    async def ask(request_id: str, temperature: float = 0.5, samples: int = 2) -> str:
        async with evaluated.database.begin() as connection:
            request = Request(evaluated.run_id, request_id, "anna")
            return (await evaluations.ask_evaluation(connection, request, temperature, samples)).label

    assert [await ask(request_id) for request_id in ("1", "1", "2")] == ["asked1-t0.5"] * 3
    assert [await ask("3", samples=4), await ask("4", temperature=0.0)] == ["asked2-t0.5", "asked3-greedy"]
    await evaluated.evaluate(0, solved=1, label="asked1-t0.5")
    assert await ask("1") == "asked1-t0.5", "the late copy of an old request"
    assert await ask("5") == "asked4-t0.5", "that one has ended"


async def test_an_evaluation_that_lacks_verdicts_is_never_the_best(evaluated: Evaluations) -> None:
    """The missing verdicts may be those of the hard tasks; and a missing verdict is no failure either."""
    await evaluated.evaluate(2, solved=1, verdicts=1)
    assert await evaluated.best() == (None, None)
    async with evaluated.database.begin() as connection:
        tasks = await evaluated_tasks(connection, evaluated.run_id, "step2-t1")
    report = report_evaluation(tasks)
    assert (report["tasks"], report["rollouts"], report["verdicts"], report["without_verdict"]) == (4, 4, 1, 3)
    assert report["pass_at_k"]["1"]["mean"] == 1.0 and report["pass_at_k"]["1"]["num_tasks"] == 1


async def test_a_report_has_datasets_and_families(evaluated: Evaluations) -> None:
    await evaluated.evaluate(2, solved=2)
    async with evaluated.database.begin() as connection:
        report = report_evaluation(await evaluated_tasks(connection, evaluated.run_id, "step2-t1"))
        listed = await evaluation_rates(connection, evaluated.run_id)
    means = {name: part["pass_at_k"]["1"]["mean"] for name, part in report["by_dataset"].items()}
    assert means == {"d0": 0.5, "d1": 0.5} and report["by_family"]["f"]["tasks"] == 3
    assert [(one.label, one.num_rollouts, one.num_graded, one.mean) for one in listed] == [("step2-t1", 4, 4, 0.5)]


async def test_weights_and_checkpoint_of_the_best_step_stay(evaluated: Evaluations) -> None:
    lease = RunLease(evaluated.run_id, 0, 0, None)
    await evaluated.evaluate(2, solved=4)
    async with evaluated.database.begin() as connection:
        for step in range(1, 11):
            await learner_commits.record_published(connection, lease, step, f"/p/{step}.e0", [], {"loss": 0.0})
            remaining = await learner_commits.retire_versions(connection, lease, num_kept=1)
            if step % 2 == 0:
                kept = await learner_commits.commit_checkpoint(
                    connection, lease, step, f"/c/step{step}.e0", 1, 1, {"s": 0.0}
                )
    assert kept == ["/c/step10.e0", "/c/step8.e0", "/c/step2.e0"]
    assert set(remaining.uris) == {"/p/10.e0", "/p/8.e0", "/p/6.e0", "/p/2.e0"}, "newest, kept checkpoints, best"
    async with evaluated.database.begin() as connection:
        await runs.end_run(connection, evaluated.run_id, RunState.DONE)
        await retention.retire_weights(connection, evaluated.run_id)
        files = await retention.kept_files(connection, evaluated.run_id)
    assert files.versions == {"10.e0", "2.e0"} and files.checkpoints == {"step10.e0", "step2.e0"}


async def test_asked_evaluations_wait_until_they_have_ended(evaluated: Evaluations) -> None:
    async with evaluated.database.begin() as connection:
        for number, temperature in enumerate((0.5, 0.0)):
            request = Request(evaluated.run_id, str(number), "anna")
            await evaluations.ask_evaluation(connection, request, temperature, 2)
        asked = await evaluations.asked_evaluations(connection, evaluated.run_id)
        assert [one.label for one in asked] == ["asked1-t0.5", "asked2-greedy"]
    await evaluated.evaluate(0, solved=1, label="asked1-t0.5")
    async with evaluated.database.begin() as connection:
        asked = await evaluations.asked_evaluations(connection, evaluated.run_id)
        assert [one.label for one in asked] == ["asked2-greedy"]
        await runs.end_run(connection, evaluated.run_id, RunState.DONE)
        with pytest.raises(ConfigError, match="is not open"):
            await evaluations.ask_evaluation(connection, Request(evaluated.run_id, "3", "anna"), 1.0, 1)
