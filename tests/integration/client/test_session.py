"""Reports of the client as data frames, over a store with a run of every kind of outcome and over an empty run; and
what a recall refuses before it changes anything.
"""

import asyncio
import json
import shlex
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from typer.core import TyperGroup
from typer.main import get_command

from activities.dataset_import import import_dataset
from cli.main import app
from client import Client
from client.session import Rows, Run, _new_run
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, MachineError
from ratchet.types import RunState
from store.database import Database
from store.schema import (
    AdmissionTable,
    Base,
    BatchTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    SteeringTable,
    TaskTable,
)
from tests.free_ports import free_ports
from tests.integration.reads.test_recall import NOON, graded_group
from tests.integration.training.records import make_config, make_group, make_run
from tests.integration.viewer.filled_store import fill_run
from training.planner import plan_step

REPORTS: list[Callable[[Run], Rows]] = [Run.steps, Run.mix, Run.groups, Run.rollouts, Run.evaluations, Run.steering]


async def test_a_frame_without_rows_has_the_columns_of_one_with_rows(
    database: Database, run_id: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    client = Client(tmp_path)
    no_runs = client.runs().frame()
    await fill_run(database, run_id, model)
    await make_run(database, "new", make_config(), model)
    runs = client.runs().frame()
    assert list(no_runs.columns) == list(runs.columns) and no_runs.empty
    for report in REPORTS:
        filled, empty = (report(client.run(name)).frame() for name in (run_id, "new"))
        assert empty.empty and len(empty.columns) > 4, report
        if not filled.empty:
            known = [name for name in empty.columns if filled[name].notna().all() and empty[name].dtype != float]
            assert known and empty.dtypes[known].equals(filled.dtypes[known]), report


@pytest.fixture
async def dataset(database: Database, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dataset of a running run whose first step was trained on its task `t`, which is examined. Its tests are
    mended since. Step 2 was trained on a group without patches, of the task `bare`.
    """
    path = tmp_path / "tasks.jsonl"
    write_tests(path, "true")
    config = make_config(datasets=[{"path": str(path)}], training={"groups_per_step": 1, "steps": 4})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        await import_dataset(connection, config.datasets[0])
        await graded_group_of(connection, run_id, 1, "t")
        await train(connection, run_id, config, 1)
        bare = await make_group(connection, run_id, 0, [1.0, 0.0])
        await connection.execute(update(TaskTable).where(TaskTable.label == "0").values(label="bare"))
        await connection.execute(update(RolloutTable).where(RolloutTable.group_id == bare).values(ended_at=NOON))
        await train(connection, run_id, config, 2)
    write_tests(path, "false")
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    free_ports(tmp_path)
    return path


async def graded_group_of(connection: AsyncConnection, run_id: str, number: int, label: str) -> None:
    """Make a group of a task, as it was first imported, with verdicts. That row is examined."""
    task_id = (await connection.execute(select(func.min(TaskTable.id)).where(TaskTable.label == label))).scalar_one()
    examined = {"task_id": task_id, "grader": "eval_cmd", "grader_version": "5", "admitted": True, "evidence": []}
    await connection.execute(insert(AdmissionTable).values(**examined))
    members = await graded_group(connection, run_id, number)
    await connection.execute(update(RolloutTable).where(RolloutTable.id.in_(members)).values(task_id=task_id))
    is_it = (RolloutGroupTable.run_id == run_id) & (RolloutGroupTable.group_no == number)
    await connection.execute(update(RolloutGroupTable).where(is_it).values(task_id=task_id))


def write_tests(path: Path, eval_cmd: str, **others: str) -> None:
    """Write a dataset of the task `t` and others, by their labels, with these tests."""
    rows = [
        {"prompt": "make it right", "label": label, "metadata": {"image": "host", "workdir": "/w", "eval_cmd": tests}}
        for label, tests in {"t": eval_cmd, **others}.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def train(connection: Any, run_id: str, config: RunConfig, step: int) -> None:
    assert await plan_step(connection, run_id, config) == step
    await connection.execute(update(BatchTable).where(BatchTable.run_id == run_id).values(state="stepped"))


async def all_rows(database: Database) -> dict[str, list[str]]:
    async with database.begin() as connection:
        tables = [(table.name, await connection.execute(select(table))) for table in Base.metadata.sorted_tables]
        return {name: sorted(map(repr, rows)) for name, rows in tables}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"grader": "eval_cmd", "since": NOON + timedelta(days=1)},
            "^run {run_id} has no patch with such a verdict, .* nothing to put right",
        ),
        (
            {"task": "bare"},
            "^run {run_id} has no patch with such a verdict, .* another fault",
        ),
        (
            {"task": "t"},
            "^{path}: 1 tasks have other tests that are not examined, such as 't': `ratchet tasks admit {path}` first$",
        ),
        ({"grader": "eval_cmd"}, "such as 't'"),
    ],
)
async def test_a_recall_is_refused_before_anything_is_changed(
    database: Database, run_id: str, dataset: Path, fault: dict[str, Any], said: str
) -> None:
    """Neither are the mended tests imported, nor is the run stopped, which goes on."""
    before = await all_rows(database)
    run = Client(dataset.parent).run(run_id)
    with pytest.raises(ConfigError, match=said.format(run_id=run_id, path=dataset)):
        run.apply_recall(run.recall(**fault))
    assert await all_rows(database) == before


async def test_a_run_on_stored_groups_is_not_recalled(database: Database, run_id: str, dataset: Path) -> None:
    await make_run(database, "source", make_config())
    async with database.begin() as connection:
        stored = update(RunTable).where(RunTable.run_id == run_id)
        await connection.execute(stored.values(source_run_id="source"))
    before = await all_rows(database)
    run = Client(dataset.parent).run(run_id)
    with pytest.raises(ConfigError, match=f"run {run_id} sampled nothing: train on run source again with --new"):
        run.apply_recall(run.recall(task="t"))
    assert await all_rows(database) == before


async def test_a_run_that_ends_before_it_is_stopped_is_recalled(database: Database, run_id: str, dataset: Path) -> None:
    """Its patches are to be graded, for which no Temporal answers here."""
    loop, said = asyncio.get_running_loop(), list[str]()

    def say(line: str) -> None:
        said.append(line)
        if line == "the datasets have other tests for 0 of 1 tasks":
            wait_for(loop, end_run(database, run_id))

    write_tests(dataset, "true")
    run = Client(dataset.parent).run(run_id)
    with pytest.raises(MachineError, match="Temporal"):
        await asyncio.to_thread(run.apply_recall, run.recall(task="t"), say)
    async with database.begin() as connection:
        assert not (await connection.execute(select(SteeringTable.id))).all()
    assert len(said) == 1


async def test_tasks_of_rollouts_that_end_meanwhile_are_examined_too(
    database: Database, run_id: str, dataset: Path
) -> None:
    """Rollouts of the task `late`, whose tests are mended, get their wrong verdicts while the datasets are imported."""
    loop, config = asyncio.get_running_loop(), make_config(datasets=[{"path": str(dataset)}])
    write_tests(dataset, "true", late="true")
    async with database.begin() as connection:
        await import_dataset(connection, config.datasets[0])
    write_tests(dataset, "true", late="false")

    async def add() -> None:
        async with database.begin() as connection:
            await graded_group_of(connection, run_id, 2, "late")
        await end_run(database, run_id)

    def say(line: str) -> None:
        assert line == "the datasets have other tests for 0 of 1 tasks"
        wait_for(loop, add())

    run = Client(dataset.parent).run(run_id)
    with pytest.raises(ConfigError, match="1 tasks have other tests that are not examined, such as 'late'"):
        await asyncio.to_thread(run.apply_recall, run.recall(grader="eval_cmd"), say)


async def test_a_source_names_the_command_for_the_run_of_its_recall(
    database: Database, run_id: str, dataset: Path
) -> None:
    """The command has the options of this one, and works as it is written."""
    said = list[str]()
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    run, parser = Client(dataset.parent).run(run_id), group.commands["recall"]
    for fault, options in (
        ({"task": "t"}, ["--task", "t"]),
        ({"grader": "eval_cmd@5", "since": NOON}, ["--grader", "eval_cmd@5", "--since", "2026-11-01T12:00:00+0000"]),
    ):
        found = run.recall(**fault)
        name = _new_run(run.row(), found.fault, run_id)
        await make_run(database, name, make_config())
        new = run.apply_recall(found, said.append)
        assert new is not None and new.run_id == name
        command = shlex.split(said[-1].split("`")[1])
        assert command == ["ratchet", "recall", name, *options]
        parser.make_context("recall", command[2:])


async def end_run(database: Database, run_id: str) -> None:
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(state=RunState.DONE))


def wait_for(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine in the test's loop, from the thread of the command."""
    asyncio.run_coroutine_threadsafe(work, loop).result(60)
