"""A long wait of TrainRun adds a bounded number of events to its history.

The base class of TrainRun and the server are real. The workflow waits for a timer in the place of a learner.
"""

from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from ratchet.payloads import RunView
from ratchet.types import RunState, Wish
from tests.temporal_services import suggest_continue_as_new
from workflows.steered_run import SteeredRun

SUGGEST_AFTER = 60
WAIT_SECONDS = 5
POLL_SECONDS = 0.01


@activity.defn
async def look_up() -> None:
    """Stands for a look at Postgres."""


@workflow.defn(name="Waits", sandboxed=False)
class Waits(SteeredRun):
    """Returns how often it has looked during its wait."""

    @workflow.run
    async def run(self, state: RunState) -> int:
        self.num_looks = 0
        self.view = RunView(
            step=0, open_groups=[], plannable=False, wish=Wish.NONE, evaluations_ended=[], state=state,
            last_step=1, num_steps=1, evaluations=[],
        )  # fmt: skip
        await self.look_until(workflow.sleep(WAIT_SECONDS), POLL_SECONDS, self._look)
        return self.num_looks

    async def _look(self) -> None:
        self.num_looks += 1
        self.woken = True  # the next look comes at once; timers of the server are too slow for many looks
        await workflow.execute_activity(look_up, start_to_close_timeout=timedelta(seconds=60))


async def test_the_history_of_a_long_wait_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is too slow for many looks in the time of the wait, the test proves less and does not fail."""
    suggest_continue_as_new(monkeypatch, SUGGEST_AFTER)
    async with (
        Worker(client, task_queue="waits", workflows=[Waits], activities=[look_up]),
    ):
        looks, events = {}, {}
        for state in (RunState.RUNNING, RunState.PAUSED):
            handle = await client.start_workflow(Waits.run, state, id=state, task_queue="waits")
            looks[state] = await handle.result()
            events[state] = len((await handle.fetch_history()).events)
    assert looks[RunState.RUNNING] > 0 and looks[RunState.PAUSED] == 0
    assert max(events.values()) < 2 * SUGGEST_AFTER
