"""New groups are held back while boots or grades fail, and tasks that always fail are left out."""

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from sqlalchemy import func, insert, select, update
from temporalio.client import Client

from activities import run_lifecycle
from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.payloads import RunView, ViewRunInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import Purpose, SandboxRole, SandboxState
from scheduling.quarantine import QuarantinedTask
from store import box_failures, open_runs, sandboxes
from store.box_failures import BoxCounts
from store.database import Database
from store.sandboxes import NewSandbox
from store.schema import RolloutGroupTable, RolloutTable, RunTable, RunTaskTable, SandboxTable, TaskTable
from tests.integration.training.records import make_config, make_run

_TRAINING = {"group_size": 2, "min_graded": 2, "max_groups_seen": 1000, "max_staleness": 0}


async def make_boxes(database: Database, count: int, *, minutes_ago: float = 0.5, **values: Any) -> None:
    """Insert rows of the ledger as boxes of other rollouts leave them."""
    then = datetime.now(UTC) - timedelta(minutes=minutes_ago)
    row = {"provider": "p", "role": SandboxRole.AGENT, "attempt": 1, "workflow_id": "w", "image": "host"}
    times = {name: then for name in ("live_at", "released_at") if values.pop(name, False)}
    async with database.begin() as connection:
        await connection.execute(insert(SandboxTable), [row | {"created_at": then} | times | values] * count)


class View:
    """A run of four tasks, as TrainRun sees it."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database = database
        self.run_id = run_id
        settings = load_temporal_settings()
        self.activities = RunActivities(database, settings, RunConfigs(database, settings), cast(Client, None))

    async def make(
        self, num_tasks: int = 4, groups_per_step: int = 2, weights: Sequence[float | None] = (None,), **more: Any
    ) -> None:
        """`weights`: of the datasets, from which the tasks come in turn."""
        training = _TRAINING | {"groups_per_step": groups_per_step} | more
        datasets = [{"path": "unused.jsonl", "weight": weight} for weight in weights]
        await make_run(self.database, self.run_id, make_config(training=training, datasets=datasets))
        task = {"dataset": "d", "dataset_digest": self.run_id, "image": "host", "workdir": "/w", "grader": "g"}
        async with self.database.begin() as connection:
            for number in range(num_tasks):
                named = {"row_digest": str(number), "row_no": number, "label": f"task {number}", "spec": {}}
                adding = insert(TaskTable).values(**task, **named).returning(TaskTable.id)
                placed = {"run_id": self.run_id, "purpose": Purpose.TRAIN, "position": number}
                placed |= {"dataset_no": number % len(weights)}
                task_id = (await connection.execute(adding)).scalar_one()
                await connection.execute(insert(RunTaskTable).values(**placed, task_id=task_id))

    async def look(self) -> RunView:
        return await self.activities.advance_run(ViewRunInput(run_id=self.run_id))

    async def settle(self, failing: set[str], outcome: str = "infra_failed") -> list[str]:
        """Make groups and end them: those of the tasks in `failing` without verdicts. Return the tasks."""
        groups = (await self.look()).open_groups
        async with self.database.begin() as connection:
            for group in groups:
                fails = group.task in failing
                mine = update(RolloutTable).where(RolloutTable.group_id == group.group_id)
                ended = {"outcome": outcome, "outcome_reason": "no such image"} if fails else {"outcome": "graded"}
                await connection.execute(mine.values(**ended, reward=None if fails else 1.0, ended_at=func.now()))
                state = {"state": "failed"} if fails else {"state": "consumed"}
                one = update(RolloutGroupTable).where(RolloutGroupTable.id == group.group_id)
                await connection.execute(one.values(**state))
        return [group.task for group in groups]

    async def grow_older(self, seconds: float) -> None:
        async with self.database.begin() as connection:
            older = RolloutGroupTable.created_at - timedelta(seconds=seconds)
            await connection.execute(update(RolloutGroupTable).values(created_at=older))


@pytest.fixture
async def view(database: Database, run_id: str) -> View:
    found = View(database, run_id)
    await found.make()
    return found


async def test_boxes_are_counted_by_what_became_of_them(database: Database) -> None:
    creating, released = SandboxState.CREATING, SandboxState.RELEASED
    await make_boxes(database, 1, state=creating)  # at its first try
    await make_boxes(database, 99, state=creating, boot_error="", minutes_ago=9)  # the service had no room
    await make_boxes(database, 2, state=creating, boot_error="refused")
    await make_boxes(database, 4, state=creating, minutes_ago=4)  # its call hangs
    await make_boxes(database, 8, state=creating, minutes_ago=75, boot_error="refused")  # tried for 75 minutes
    await make_boxes(database, 16, state=released, boot_error="refused", released_at=True)
    await make_boxes(database, 32, state=SandboxState.LIVE, live_at=True)
    await make_boxes(database, 64, state=SandboxState.LIVE, live_at=True, minutes_ago=6)
    graded = {"role": SandboxRole.GRADE, "state": released, "released_at": True}
    await make_boxes(database, 3, **graded, release_reason=box_failures.NO_VERDICT)
    await make_boxes(database, 5, **graded, release_reason=box_failures.VERDICT_STORED)
    await make_boxes(database, 7, **graded, release_reason="rollout ended")
    await make_boxes(database, 9, **graded, release_reason=box_failures.NO_VERDICT, minutes_ago=6)
    async with database.begin() as connection:
        found = await box_failures.count_boxes(connection)
    assert found == BoxCounts(2 + 4 + 8 + 16 + 32, 2 + 4 + 8 + 16, 8, 3, "refused")


async def test_new_groups_are_held_back_while_boots_fail(view: View, database: Database) -> None:
    await make_boxes(database, 7, state=SandboxState.CREATING, boot_error="refused")
    first = await view.look()
    assert len(first.open_groups) == 1, "one tries whether it works again"
    assert first.reason == "new groups are held back: 7 of the 7 newest boots of boxes failed; the last error: refused"
    assert len((await view.look()).open_groups) == 1, "within a minute no further one"
    await view.grow_older(61)
    assert len((await view.look()).open_groups) == 2
    async with database.begin() as connection:
        await connection.execute(update(SandboxTable).values(state=SandboxState.LIVE, boot_error=None))
    await view.settle(set())
    mended = await view.look()
    assert (len(mended.open_groups), mended.reason, mended.state) == (2, "", "running")


async def test_a_task_that_always_fails_is_left_out_until_the_run_is_resumed(view: View, database: Database) -> None:
    tasks = [task for _ in range(10) for task in await view.settle({"task 1"})]
    assert tasks.count("task 1") == 3
    assert all(tasks.count(f"task {number}") >= 5 for number in (0, 2, 3))
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(state="paused"))
        await open_runs.resume_run(connection, view.run_id)
    assert "task 1" in [task for _ in range(3) for task in await view.settle({"task 1"})]


@pytest.mark.parametrize("groups_per_step", [2, 4, 8])
async def test_an_outage_that_hits_every_task_puts_none_into_quarantine(
    database: Database, run_id: str, groups_per_step: int
) -> None:
    """Also shortly after the groups that got their verdicts, and if each task has several groups in a step."""
    view = View(database, run_id)
    await view.make(groups_per_step=groups_per_step)
    await view.settle(set())
    everything = {f"task {number}" for number in range(4)}
    for _ in range(8):
        await view.settle(everything)
    tasks = [task for _ in range(4) for task in await view.settle(set())]
    assert set(tasks) == everything


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_run_whose_every_task_is_in_quarantine_is_paused(
    database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    view = View(database, run_id)
    await view.make(forks={"share": share})

    async def all_of_them(*_: object) -> list[QuarantinedTask]:
        async with view.database.begin() as connection:
            ids = (await connection.execute(select(TaskTable.id))).scalars()
            return [QuarantinedTask(one, "t", 3, "") for one in ids]

    monkeypatch.setattr(run_lifecycle, "quarantined_tasks", all_of_them)
    paused = await view.look()
    assert (paused.open_groups, paused.state) == ([], "paused")
    assert paused.reason == f"every task is in quarantine; see `ratchet status {view.run_id}`"


async def test_a_run_whose_datasets_with_weight_are_in_quarantine_is_paused_with_that_reason(
    database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(database, run_id)
    await view.make(weights=[1.0, 0.0])

    async def those_with_weight(*_: object) -> list[QuarantinedTask]:
        async with database.begin() as connection:
            ids = await connection.execute(select(RunTaskTable.task_id).where(RunTaskTable.dataset_no == 0))
            return [QuarantinedTask(one, "t", 3, "") for one in ids.scalars()]

    monkeypatch.setattr(run_lifecycle, "quarantined_tasks", those_with_weight)
    paused = await view.look()
    assert (paused.open_groups, paused.state) == ([], "paused")
    assert paused.reason == (
        f"every task of the datasets with a weight above 0 is in quarantine; see `ratchet status {run_id}`"
    )


async def test_agents_and_graders_share_the_limit_of_boots(database: Database) -> None:
    async def reserve(role: SandboxRole) -> int | None:
        new = NewSandbox(provider="p", role=role, rollout_id=None, attempt=1, workflow_id="w", image="host")
        async with database.begin() as connection:
            row = await sandboxes.reserve_sandbox(connection, new, max_boxes=20, max_boots=2)
        return row.id if row else None

    agent, grade = await reserve(SandboxRole.AGENT), await reserve(SandboxRole.GRADE)
    assert agent is not None and grade is not None
    assert await reserve(SandboxRole.AGENT) is None and await reserve(SandboxRole.GRADE) is None
    async with database.begin() as connection:
        await sandboxes.set_boot_error(connection, agent, "refused")
    assert await reserve(SandboxRole.GRADE) is not None, "a failed try holds no place"
    async with database.begin() as connection:
        await sandboxes.set_sandbox_live(connection, grade, "box")
    assert await reserve(SandboxRole.AGENT) is not None


@pytest.mark.parametrize(
    ("free", "state", "num_groups", "words"),
    [
        (0.06, "running", 2, ""),
        (0.04, "running", 0, "new groups are held back: only 4.0% (4.0 GB) of the disk of "),
        (0.01, "paused", 0, "1.0% (1.0 GB) of the disk of "),
    ],
)
async def test_a_disk_that_fills_up_holds_groups_back_and_then_pauses_the_run(
    view: View, monkeypatch: pytest.MonkeyPatch, free: float, state: str, num_groups: int, words: str
) -> None:
    usage = shutil.disk_usage("/")._replace(total=10**11, free=int(free * 10**11))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen = await view.look()
    assert (seen.state, len(seen.open_groups), seen.reason[: len(words)]) == (state, num_groups, words)
    assert bool(seen.reason) is bool(words)
