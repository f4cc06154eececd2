"""Admission and regrading through the real workflows, and their effect on empty patches and rewards."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select, update
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ActivityError

from activities.dataset_import import import_dataset, usable_task_ids
from activities.datasets.formats import dataset_digest, read_rows
from activities.datasets.package_recipes import PYTHON, write_rows
from client.workflows import follow_workflow
from ratchet import paths
from ratchet.config import DatasetConfig, RunConfig
from ratchet.errors import DatasetError
from ratchet.progress import ReportProgress
from store import tasks
from store.schema import AdmissionTable, GradeTable, RolloutTable, SandboxTable, TaskTable, TurnTable
from tests.integration.grading.harbor_tasks import TASKS
from tests.integration.workflows.conftest import ROOT, Loop
from tests.integration.workflows.test_rollout import PRE, TASK, call, finish
from workflows.activity_options import failure_cause

pytestmark = pytest.mark.timeout(600)
GOLD = "diff --git a/a.txt b/a.txt\n--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+two\n"


def dataset(loop: Loop, **rows: dict[str, Any]) -> str:
    path = loop.home / f"{uuid4().hex[:8]}.jsonl"
    base = {"image": "host", "workdir": "/workspace/repo", "pre_commands": [PRE], "gold_patch": GOLD}
    path.write_text(
        "".join(
            json.dumps({"prompt": "p", "label": label, "metadata": {**base, **row}}) + "\n"
            for label, row in rows.items()
        )
    )
    return str(path)


async def run(loop: Loop, workflow: str, argument: dict[str, Any], say: ReportProgress = lambda _: None) -> Any:
    id = f"{workflow}/{uuid4().hex[:8]}"
    handle = await loop.client.start_workflow(workflow, argument, id=id, task_queue="control")
    return await loop.result(handle, by=follow_workflow(loop.client, handle, workflow, say))


async def test_admission_tells_good_broken_and_flaky_tasks_apart(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.workflows._LOOK_SECONDS", 0.1)  # the good task takes seconds longer than the others
    check = 'test "$(cat a.txt)" = two'
    path = dataset(
        loop,
        good={"eval_cmd": check},
        gold_fails={"eval_cmd": 'test "$(cat a.txt)" = three'},
        empty_passes={"eval_cmd": "true"},
        no_gold={"eval_cmd": check, "gold_patch": None},
        cannot_run={"eval_cmd": "no-such-program"},
        runs_nothing={"eval_cmd": "no-such-runner || true"},
        no_image={"eval_cmd": check, "image": "no-such-image"},
        flaky={"eval_cmd": f"{check} && test $(($(date +%N) % 2)) = 0 && test $((RANDOM % 16)) = 0"},
    )
    said: list[str] = []
    result = await run(loop, "AdmitTasks", {"dataset": path, "repeats": 2, "window": 3}, said.append)
    assert result == {"admitted": 1, "quarantined": 7}
    assert any(text.endswith(" quarantined") for text in said), f"a person sees how far the examination is: {said}"
    async with loop.database.begin() as connection:
        found = select(
            TaskTable.label,
            AdmissionTable.admitted,
            AdmissionTable.reason,
            AdmissionTable.evidence,
            AdmissionTable.gold_seconds,
        )
        rows = {
            row.label: row
            for row in await connection.execute(
                found.join(TaskTable, TaskTable.id == AdmissionTable.task_id).where(TaskTable.dataset == path)
            )
        }
        held = select(func.count()).where(SandboxTable.rollout_id.is_(None), SandboxTable.state != "released")
        assert (await connection.execute(held)).scalar_one() == 0
    assert rows["good"].admitted and rows["good"].gold_seconds > 0
    kinds = [trial["patch"] for trial in rows["good"].evidence]
    assert kinds[:4] == ["gold", "empty", "gold", "empty"] and set(kinds[4:-1]) == {"broken"} and kinds[-1] == "grade"
    assert "gold patch passed 0 of 2" in rows["gold_fails"].reason
    assert "empty patch failed 0 of 2" in rows["empty_passes"].reason
    assert "no gold_patch" in rows["no_gold"].reason
    assert "could not run" in rows["cannot_run"].reason
    assert "no-such-runner: command not found" in rows["runs_nothing"].reason
    assert not rows["flaky"].admitted
    command = [sys.executable, "-m", "cli.main", "tasks", "list", path]
    listed = subprocess.run(command, env=loop.environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = {line.split()[1]: " ".join(line.split()) for line in listed.splitlines() if " eval_cmd " in line}
    assert "good eval_cmd admitted 2/2 2/2" in lines["good"], listed
    assert "empty_passes eval_cmd quarantined 2/2 0/2" in lines["empty_passes"], listed
    command.append("--json")
    listed = subprocess.run(command, env=loop.environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {one["label"]: one["admitted"] for one in json.loads(listed)}["good"] is True
    again = await run(loop, "AdmitTasks", {"dataset": path, "repeats": 2})
    assert again == {"admitted": 0, "quarantined": 0}, "what the present graders have examined is not examined again"


@pytest.mark.parametrize(("text", "reward"), [("two", 1.0), ("three", 0.0)])
async def test_a_rollout_that_ignores_admission_believes_a_command_that_prints_nothing(
    loop: Loop, text: str, reward: float
) -> None:
    """Exit code 0 is then solved, as its row says; tests/integration/grading has the runs that do not ignore it."""
    path = dataset(loop, silent={"eval_cmd": 'test "$(cat a.txt)" = two', "gold_patch": None})
    await loop.script(call(f"echo {text} > a.txt"), "Done.")
    _, row = await finish(loop, await loop.start(path, grading={"admission": "ignored"}))
    assert (row.outcome, row.reward) == ("graded", reward), row.outcome_reason


async def test_a_harbor_task_is_admitted_by_its_solution(loop: Loop) -> None:
    """The gold patch is made once, by the solution in a box; a task that needs the network is refused by name."""
    directory = loop.home / uuid4().hex[:8]
    TASKS["hello"].write(directory / "hello")
    replace(TASKS["hello"], solution="true\n").write(directory / "nothing")
    assert await run(loop, "AdmitTasks", {"dataset": str(directory), "repeats": 1}) == {"admitted": 1, "quarantined": 1}
    async with loop.database.begin() as connection:
        statement = select(TaskTable.label, TaskTable.spec, AdmissionTable.reason)
        statement = statement.join(AdmissionTable, TaskTable.id == AdmissionTable.task_id)
        rows = {
            row.label: row for row in await connection.execute(statement.where(TaskTable.dataset == str(directory)))
        }
    assert "+Hello, world!" in rows["hello"].spec["gold_patch"] and not rows["hello"].reason
    assert "solution changed no file below /app" in rows["nothing"].reason
    replace(TASKS["hello"], script="uvx pytest /tests\n").write(directory / "online")
    with pytest.raises(WorkflowFailureError) as failed:
        await run(loop, "AdmitTasks", {"dataset": str(directory), "repeats": 1})
    cause = failed.value.cause
    assert isinstance(cause, ActivityError)
    assert "sandbox.network of ['grade'], found []: 1 tasks: online" in failure_cause(cause).message


async def test_a_task_is_not_admitted_if_grades_leave_out_what_its_solution_needs(loop: Loop) -> None:
    """The command has no assertion that can be changed, so no control run lets a patch change what it runs."""
    names = "diff --git a/Makefile b/Makefile\n--- a/Makefile\n+++ b/Makefile\n"
    target = names + "@@ -1,2 +1,2 @@\n check:\n-\tfalse\n+\ttrue\n"
    row = {
        "eval_cmd": "make -s check",
        "gold_patch": target,
        "pre_commands": ["printf 'check:\\n\\tfalse\\n' > Makefile && " + PRE],
    }
    path = dataset(loop, screened=row, allowed={**row, "integrity": {"allow": ["Makefile"]}})
    assert await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1}) == {"admitted": 1, "quarantined": 1}
    async with loop.database.begin() as connection:
        statement = select(TaskTable.label, AdmissionTable.admitted, AdmissionTable.reason)
        statement = statement.join(TaskTable, TaskTable.id == AdmissionTable.task_id).where(TaskTable.dataset == path)
        rows = {row.label: row for row in await connection.execute(statement)}
    assert rows["allowed"].admitted
    reason = rows["screened"].reason
    assert "Makefile of the gold patch is left out" in reason and "metadata.integrity.allow" in reason


async def test_tasks_of_real_packages_are_admitted(loop: Loop) -> None:
    """Two tasks of the bundled package dataset, fetched and built here; `datasets/packages/ADMISSION.md` covers all."""
    recipes = ROOT / "datasets" / "packages"
    only = frozenset({"inflection-0.5.1-9c59df57", "isodate-0.7.2-63e104e0"})
    path = loop.home / "packages.jsonl"
    write_rows(recipes, path, paths.cache(), "host", PYTHON, only)
    result = await run(loop, "AdmitTasks", {"dataset": str(path), "repeats": 1, "window": 2})
    async with loop.database.begin() as connection:
        found = select(TaskTable.label, AdmissionTable.reason, AdmissionTable.evidence).join(
            TaskTable, TaskTable.id == AdmissionTable.task_id
        )
        rows = (await connection.execute(found.where(TaskTable.dataset == str(path)))).all()
    assert {row.label for row in rows} == only
    assert result == {"admitted": 2, "quarantined": 0}, [row.reason for row in rows]
    judged = [trial for row in rows for trial in row.evidence if trial["patch"] in ("gold", "empty")]
    assert all("fail-to-pass" in trial["reason"] for trial in judged)
    assert all(row.evidence[-1]["patch"] == "control" and row.evidence[-1]["solved"] for row in rows)
    for row in rows:
        broken = [trial for trial in row.evidence if trial["patch"] == "broken"]
        assert sum(trial["solved"] for trial in broken) == 4, broken


@pytest.mark.parametrize("said_by", ["admission", "row"])
async def test_an_empty_patch_that_is_known_to_fail_needs_no_grading_box(loop: Loop, said_by: str) -> None:
    path = dataset(loop, task={"eval_cmd": TASK["eval_cmd"], "empty_patch_fails": said_by == "row"})
    if said_by == "admission":
        assert (await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1}))["admitted"] == 1
    await loop.script("I give up.")
    _, row = await finish(loop, await loop.start(path))
    assert (row.outcome, row.reward, row.reward_components) == ("graded", 0.0, {"solved": 0.0})
    async with loop.database.begin() as connection:
        roles = (
            (await connection.execute(select(SandboxTable.role).where(SandboxTable.rollout_id == row.id)))
            .scalars()
            .all()
        )
        reason = (
            await connection.execute(select(GradeTable.reason).where(GradeTable.rollout_id == row.id))
        ).scalar_one()
    assert roles == ["agent"] and reason.startswith("the patch is empty") and said_by in reason


async def test_an_empty_patch_may_earn_a_fraction_of_a_reward_file(loop: Loop) -> None:
    script = "#!/bin/bash\nif grep -qs Hello /app/*; then echo 1; else echo 0.3; fi > /logs/verifier/reward.txt\n"
    path = str(replace(TASKS["hello"], script=script).write(loop.home / uuid4().hex[:8]))
    assert (await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1}))["admitted"] == 1
    await loop.script("I give up.")
    _, row = await finish(loop, await loop.start(path))
    assert (row.outcome, row.reward) == ("graded", 0.3)


async def test_admission_believes_no_row(loop: Loop) -> None:
    path = dataset(loop, task={"eval_cmd": "true", "empty_patch_fails": True})
    assert await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1}) == {"admitted": 0, "quarantined": 1}


async def test_an_import_that_was_broken_off_is_completed_and_another_one_adds_nothing(loop: Loop) -> None:
    path = dataset(loop, one={"eval_cmd": "true"}, two={"eval_cmd": "false"}, three={"eval_cmd": "exit 3"})
    config = DatasetConfig(path=path)
    rows = list(read_rows(config, dataset_digest(config)))
    async with loop.database.begin() as connection:
        assert await tasks.import_tasks(connection, rows[:1]) == 1
    for expected in (2, 0):
        async with loop.database.begin() as connection:
            assert await import_dataset(connection, config) == expected
    async with loop.database.begin() as connection:
        assert [label for _, label, _ in await tasks.tasks_of_dataset(connection, dataset_digest(config))] == [
            "one",
            "two",
            "three",
        ]


@pytest.mark.parametrize("given", [{}, {"gold_patch": None}])
async def test_a_made_gold_patch_is_stored_beside_none_and_null(loop: Loop, given: dict[str, Any]) -> None:
    path = loop.home / f"{uuid4().hex[:8]}.jsonl"
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true", **given}
    path.write_text(json.dumps({"prompt": "p", "label": "a", "metadata": metadata}) + "\n")
    config = DatasetConfig(path=str(path))
    async with loop.database.begin() as connection:
        await import_dataset(connection, config)
        (task,) = await tasks.tasks_of_dataset(connection, dataset_digest(config))
        for patch in ("made", "made again"):
            await tasks.set_gold_patch(connection, task.task_id, patch)
        assert (await tasks.get_task(connection, task.task_id)).spec["gold_patch"] == "made"


async def test_a_row_that_an_earlier_version_read_otherwise_is_one_task(loop: Loop) -> None:
    path = dataset(loop, one={"eval_cmd": "true"}, two={"eval_cmd": "false"})
    config = DatasetConfig(path=path)
    digest = dataset_digest(config)
    rows = list(read_rows(config, digest))
    earlier = rows[0].copy()
    earlier["spec"] = {**rows[0]["spec"], "eval_cmd": "/tests/test.sh"}
    earlier["row_digest"] = "0" * 64
    async with loop.database.begin() as connection:
        assert await tasks.import_tasks(connection, [earlier]) == 1
        (held,) = await tasks.tasks_of_dataset(connection, digest)
        await import_dataset(connection, config)
        found = await tasks.tasks_of_dataset(connection, digest)
        assert [(one.label, one.row_no) for one in found] == [("one", 0), ("two", 1)]
        assert held not in found and await tasks.get_task(connection, held.task_id)
        assert await tasks.page_of_tasks(connection, digest, -1, 10, [], None) == found
        (listed,) = [one for one in await tasks.list_datasets(connection) if one["dataset_digest"] == digest]
        assert listed["rows"] == 2


async def test_what_a_run_takes_of_a_dataset_follows_its_rule_on_admission(loop: Loop) -> None:
    path = dataset(loop, good={"eval_cmd": TASK["eval_cmd"]}, bad={"eval_cmd": "true"})

    async def labels(**grading: str) -> list[str]:
        config = RunConfig.model_validate({"datasets": [{"path": path}], "grading": grading})
        async with loop.database.begin() as connection:
            ids = await usable_task_ids(connection, config.datasets[0], dataset_digest(config.datasets[0]), config)
            return list(
                (
                    await connection.execute(
                        select(TaskTable.label).where(TaskTable.id.in_(ids)).order_by(TaskTable.row_no)
                    )
                ).scalars()
            )

    await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1, "labels": ["nobody"]})
    with pytest.raises(DatasetError, match="none of its 2 tasks is admitted"):
        await labels(admission="required")
    assert await labels() == ["good", "bad"], "a row without an admission is used without an oracle"
    await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1})
    assert await labels() == await labels(admission="required") == ["good"]
    assert await labels(admission="ignored") == ["good", "bad"]
    with pytest.raises(DatasetError, match=r"\(0 were examined by the present graders as root\)"):
        await labels(admission="required", user="root")
    await run(loop, "AdmitTasks", {"dataset": path, "repeats": 1, "user": "root"})
    assert await labels(admission="required", user="root") == ["good"]


async def test_a_stored_patch_is_graded_again_without_a_model_call(loop: Loop) -> None:
    """A verdict that a broken grader could not give is given later, three times, and decides the reward."""
    await loop.script(call("echo two > a.txt"), "Done.")
    switch = "no-such-program --of-the-tests"
    started = await loop.start(
        loop.dataset(pre_commands=[PRE], eval_cmd=switch), limits={"agent_seconds": 300, "eval_seconds": 60}
    )
    _, row = await finish(loop, started)
    assert (row.outcome, row.reward, row.agent_exit, row.num_turns) == ("grader_failed", None, "done", 2)
    async with loop.database.begin() as connection:
        spec = {
            **(await connection.execute(select(TaskTable.spec).where(TaskTable.id == row.task_id))).scalar_one(),
            "eval_cmd": TASK["eval_cmd"],
            "empty_patch_fails": True,
        }
        await connection.execute(update(TaskTable).where(TaskTable.id == row.task_id).values(spec=spec))
        turns = (await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))).scalar_one()
    looked = await run(loop, "Regrade", {"rollout_id": row.id, "repeats": 3})
    assert looked == {"rollouts": 1, "changed": 1, "flaky": 0, "adopted": 0, "without_verdict": 0}
    async with loop.database.begin() as connection:
        assert (
            await connection.execute(select(RolloutTable.reward).where(RolloutTable.id == row.id))
        ).scalar_one() is None
    adopted = await run(loop, "Regrade", {"rollout_id": row.id, "adopt": True})
    assert adopted["adopted"] == 1
    async with loop.database.begin() as connection:
        paid = (
            await connection.execute(select(RolloutTable.outcome, RolloutTable.reward).where(RolloutTable.id == row.id))
        ).one()
        given = (
            await connection.execute(
                select(GradeTable.solved, GradeTable.repeat, GradeTable.reason)
                .where(GradeTable.rollout_id == row.id)
                .order_by(GradeTable.id)
            )
        ).all()
        states = set(
            (await connection.execute(select(SandboxTable.state).where(SandboxTable.rollout_id == row.id))).scalars()
        )
        assert (
            await connection.execute(select(func.count()).where(TurnTable.rollout_id == row.id))
        ).scalar_one() == turns
    assert [tuple(one)[:2] for one in given] == [(True, 0), (True, 1), (True, 2), (True, 0)], given
    assert tuple(paid) == ("graded", 1.0) and states == {"released"}
