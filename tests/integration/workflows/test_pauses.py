"""A run is never a dead end: what fails for good pauses it, and a person lets it go on."""

from typing import Any

import pytest
from sqlalchemy import select, update
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError

from ratchet.sweep_payloads import SweepInput, SweepResult
from ratchet.temporal_client import start_train_run
from store import open_runs
from store.schema import RolloutGroupTable, RunTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training, training

pytestmark = pytest.mark.timeout(600)
__all__ = ["training"]


class Operator:
    """A person who looks at a run and steers it."""

    def __init__(self, loop: Loop, run_id: str) -> None:
        self.loop = loop
        self.run_id = run_id
        self.handle = loop.client.get_workflow_handle(f"run/{run_id}")

    async def row(self) -> Any:
        async with self.loop.database.begin() as connection:
            return (await connection.execute(select(RunTable).where(RunTable.run_id == self.run_id))).one_or_none()

    async def change(self, table: Any, **values: Any) -> None:
        async with self.loop.database.begin() as connection:
            await connection.execute(update(table).where(table.run_id == self.run_id).values(**values))

    async def state_is(self, state: str) -> Any:
        async def reached() -> Any:
            row = await self.row()
            return row if row is not None and row.state == state else None

        return await self.loop.until(reached, f"the run is {state}")

    async def resume(self) -> str | None:
        async with self.loop.database.begin() as connection:
            reason = await open_runs.resume_run(connection, self.run_id)
        await start_train_run(self.loop.client, self.loop.settings, self.run_id)
        return reason

    async def start_workflow(self) -> None:
        """Start the run's workflow again, as the sweep does."""
        await start_train_run(self.loop.client, self.loop.settings, self.run_id)

    async def sweep(self) -> SweepResult:
        found: SweepResult = await self.loop.client.execute_workflow(
            "Sweep", SweepInput(), id=f"sweep/{self.run_id}", task_queue="control", result_type=SweepResult
        )
        return found

    async def begins(self) -> None:
        """Wait until the workflow has prepared the run; if it is cancelled earlier, only the sweep notices."""

        async def begun() -> bool:
            found = await self.handle.describe()
            return found.status is WorkflowExecutionStatus.RUNNING and found.history_length > 10

        await self.loop.until(begun, "the workflow works")

    async def status(self) -> WorkflowExecutionStatus | None:
        return (await self.handle.describe()).status


@pytest.fixture
async def operator(training: Training, loop: Loop) -> Operator:
    for row in await loop.until(training.working, "both agents work"):  # what they were started with has been read
        await loop.until_a_call_waits(loop.client.get_workflow_handle(row.workflow_id))
    return Operator(loop, training.run_id)


async def test_an_error_that_may_not_be_retried_pauses_the_run(
    operator: Operator, training: Training, loop: Loop
) -> None:
    """Also if it comes back every time that the workflow looks; the agents at work notice nothing."""
    members = await training.rows()
    await operator.change(RolloutGroupTable, state="nonsense", label="kept")
    kept = (await operator.row()).config
    await operator.change(RunTable, config={**kept, "training": "nonsense"})
    paused = await operator.state_is("paused")
    assert "view_run failed" in paused.state_reason and "nonsense" in paused.state_reason
    assert await operator.status() is WorkflowExecutionStatus.RUNNING
    await operator.resume()
    assert "nonsense" in (await operator.state_is("paused")).state_reason, "nothing has been mended"
    await operator.change(RunTable, config=kept)
    await operator.change(RolloutGroupTable, state="open")
    assert "nonsense" in str(await operator.resume())
    await training.let_go()

    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    assert [(row.id, row.outcome) for row in (await training.rows())[:2]] == [(row.id, "graded") for row in members]
    assert (await operator.row()).state == "running"


async def test_a_paused_run_starts_nothing_and_loses_nothing(
    operator: Operator, training: Training, loop: Loop
) -> None:
    async with loop.database.begin() as connection:
        await open_runs.pause_run(connection, training.run_id, "somebody wanted it")
    await training.let_go()

    async def settled() -> bool:
        return await training.group_state() != "open"

    await loop.until(settled, "the group is settled")
    rows = await training.rows()
    assert [row.outcome for row in rows] == ["graded", "graded"], "no new group was made"
    assert await operator.resume() == "somebody wanted it"

    async def goes_on() -> bool:
        return len(await training.rows()) > len(rows)

    await loop.until(goes_on, "a new group is made")


async def test_a_terminated_run_is_paused_by_the_sweep_and_resumed(operator: Operator, training: Training) -> None:
    await operator.handle.terminate("in the UI")
    assert (await operator.sweep()).runs_restarted == 1
    assert (await operator.row()).state_reason == "its workflow was terminated"
    assert (await operator.sweep()).runs_restarted == 0, "a paused run is left alone"
    assert all(row.outcome is None for row in await training.rows()), "its rollouts go on"
    assert await operator.resume() == "its workflow was terminated"
    await operator.begins()


async def test_a_run_that_is_cancelled_before_its_workflow_can_begin_is_cancelled(
    operator: Operator, loop: Loop
) -> None:
    await operator.handle.terminate("to begin anew")
    loop.end("worker")
    try:
        await operator.resume()
        await operator.handle.cancel()
    finally:
        loop.spawn("worker")
    with pytest.raises(WorkflowFailureError):
        await loop.result(operator.handle)
    assert (await operator.row()).state == "cancelled"
    await operator.resume()
    await operator.begins()


async def test_the_sweep_cancels_a_run_whose_workflow_was_cancelled_and_did_not_say_so(
    operator: Operator, loop: Loop
) -> None:
    """A store that was restored does not say so, for example."""
    await operator.handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(operator.handle, 240)
    await operator.change(RunTable, state="running", ended_at=None)
    await operator.sweep()
    assert (await operator.row()).state == "cancelled"
    await operator.resume()
    await operator.begins()


async def test_a_cancelled_run_comes_back(operator: Operator, training: Training, loop: Loop) -> None:
    await operator.handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(operator.handle, 240)
    assert (await operator.row()).state == "cancelled"
    num_rows = len(await training.rows())
    assert await operator.resume() == "cancelled"

    async def goes_on() -> bool:
        return len(await training.rows()) > num_rows

    await loop.until(goes_on, "a new group is made")
    assert (await operator.row()).ended_at is None


async def test_a_run_whose_book_keeping_fails_can_be_cancelled(
    operator: Operator, training: Training, loop: Loop
) -> None:
    await operator.change(RunTable, wish="nonsense")
    await operator.state_is("paused")
    await operator.handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await loop.result(operator.handle, 240)
    assert (await operator.row()).state == "cancelled"

    async def nothing_works() -> bool:
        return all(row.outcome is not None for row in (await training.rows())[:2])

    await loop.until(nothing_works, "its rollouts are cancelled, too")
    await operator.change(RunTable, wish="none")
    await operator.resume()
    await operator.begins()


async def test_a_workflow_that_fails_at_once_is_started_again_until_the_bound(operator: Operator, loop: Loop) -> None:
    """Without a row of its config the workflow cannot even begin."""
    kept = (await operator.row()).config
    await operator.handle.terminate("to begin anew")
    await operator.change(RunTable, config={"training": "nonsense"})
    await operator.resume()
    for _ in range(5):
        with pytest.raises(WorkflowFailureError):
            await loop.result(operator.handle)
        assert (await operator.sweep()).runs_restarted == 1
    with pytest.raises(WorkflowFailureError):
        await loop.result(operator.handle)
    await operator.sweep()
    paused = await operator.state_is("paused")
    assert "ended 5 times within an hour" in paused.state_reason and "training" in paused.state_reason
    await operator.change(RunTable, config=kept)
    await operator.resume()
    await operator.begins()
