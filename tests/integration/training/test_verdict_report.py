"""Verdicts in the store: control runs, flags, and the report of a step."""

from sqlalchemy import select, update

from activities.grade import grade_row
from grading.base import Verdict
from grading.flags import Flag
from grading.judge_patch import JudgedPatch
from grading.registry import GRADERS
from reads.rollout_list import RolloutFilter, list_rollout_lines
from store import admissions, grades, rollouts
from store.admissions import GraderVersion, NewAdmission
from store.database import Database
from store.grades import ControlVerdict
from store.schema import RolloutTable
from store.verdict_report import VerdictReport, verdict_report
from tests.integration.training.records import make_config, make_group, make_run
from tests.integration.training.test_regrade import members_of
from training.planner import plan_step

SOLVED = Verdict(True, "all pass", "a log with \udcff", 1.0, tests={"t\0": "passed"}, has_oracle=True)
CAUGHT = ControlVerdict({"run": 0, "passed": ["t"], "failed": 0}, False, True, "control_run", "1 tests passed wrongly")
CLEAN = ControlVerdict({"run": 0, "passed": [], "failed": 2}, True, False, "control_run", "")


async def graded(database: Database, rollout_id: int, verdict: Verdict, flags: list[Flag]) -> int:
    """Store a verdict as the grade stage does and let it decide the rollout."""
    async with database.begin() as connection:
        patch = rollouts.NewPatch(
            rollout_id=rollout_id, attempt=1, base_commit="c", diff=b"", num_bytes=10, num_files=1
        )
        patch_id = await rollouts.store_patch(connection, patch)
        row = grade_row(rollout_id, patch_id, GRADERS["eval_cmd"], JudgedPatch(verdict, [], flags))
        grade_id = await grades.store_grade(connection, row)
        await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout_id).values(grade_id=grade_id))
    return grade_id


async def test_a_control_run_is_stored_once(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [1.0, 0.0])
    first, second = await members_of(database, group_id)
    for rollout_id, verdicts in ((first, (CAUGHT, CLEAN)), (second, (CLEAN, CAUGHT))):
        grade_id = await graded(database, rollout_id, SOLVED, [])
        async with database.begin() as connection:
            for verdict in verdicts:
                await grades.record_control(connection, grade_id, verdict)
            grade = await grades.get_grade(connection, grade_id, rollout_id)
        assert grade.control == [verdicts[0].result] and grade.rejected == verdicts[0].rejected
        assert grade.solved != grade.rejected and grade.tests == {"t\\0": "passed"} and grade.has_oracle


async def test_the_report_of_a_step(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [1.0, 1.0, 1.0, 0.0])
    members = await members_of(database, group_id)
    for rollout_id in members[:3]:
        grade_id = await graded(database, rollout_id, SOLVED, [Flag("walks stack frames", "a.py:3")])
        async with database.begin() as connection:
            await grades.record_control(connection, grade_id, CLEAN)
    async with database.begin() as connection:
        step = await plan_step(connection, run_id, config)
        assert step is not None
        found = await verdict_report(connection, run_id, step)
        listed = await list_rollout_lines(connection, RolloutFilter(run_id=run_id, flagged=True), 10)
        everything = await list_rollout_lines(connection, RolloutFilter(run_id=run_id), 10)
    assert found == VerdictReport(3, 3, 3, 0, 4, 0)
    assert found.numbers()["verdict_flagged_share"] == 1.0 and "3 of 3 solved rollouts are flagged" in found.alarms[0]
    assert {line.id for line in listed} == set(members[:3]) and len(everything) == 4


async def test_what_admission_knows(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await make_group(connection, run_id, 0, [1.0])
        of_run = select(RolloutTable.task_id).where(RolloutTable.run_id == run_id)
        task = (await connection.execute(of_run)).scalar_one()
        version = GraderVersion("eval_cmd", "4")
        await admissions.store_broken_oracle(connection, task, version, 2, {"a": 1})
        assert (await admissions.task_oracle(connection, task, version)).broken == {}, "it is not admitted"
        for repeat in (1, 0, 1):
            await admissions.store_trial(connection, task, version, repeat, {"repeat": repeat})
        assert await admissions.trials_of_task(connection, task, version) == [{"repeat": 0}, {"repeat": 1}]
        await admissions.delete_trials(connection, task, version)
        values = {"reason": "", "evidence": [], "gold_seconds": 1.0}
        await admissions.store_admission(
            connection,
            NewAdmission(task, *version, admitted=True, oracle={"x": 1}, **values),  # type: ignore[arg-type]
        )
        await admissions.store_admission(
            connection,
            NewAdmission(task, *version, admitted=True, oracle=None, **values),  # type: ignore[arg-type]
        )
        assert await admissions.task_oracle(connection, task, version) == ({"x": 1}, {2: {"a": 1}})
        await admissions.delete_broken_oracles(connection, task, version)
        assert (await admissions.task_oracle(connection, task, version)).broken == {}
