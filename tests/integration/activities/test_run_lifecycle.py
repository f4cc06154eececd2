"""A run's pauses and ends are recorded with reasons of any text, and by what a person has typed."""

import pytest
from temporalio.testing import ActivityEnvironment

from activities.run_configs import RunConfigs
from activities.run_lifecycle import RunActivities
from ratchet.payloads import EndRunInput, PauseRunInput
from ratchet.storable_values import storable_text
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import RunState
from reads.steering import list_requests
from store import runs, steering
from store.database import Database
from store.steering import Request
from tests.integration.training.records import make_config, make_run

REASONS = ["learn.sync failed: no JSON: \0\0", "no UTF-8: \udcff"]


async def state_of(database: Database, run_id: str) -> tuple[str, str]:
    async with database.begin() as connection:
        row = await runs.get_run(connection, run_id)
    assert row is not None
    return row.state, row.state_reason


@pytest.mark.parametrize("reason", REASONS)
async def test_a_run_is_paused_and_ends_with_a_reason_that_postgres_would_refuse(
    database: Database, run_id: str, reason: str
) -> None:
    await make_run(database, run_id, make_config())
    settings = load_temporal_settings()
    client: None = None  # not asked
    activities = RunActivities(database, settings, RunConfigs(database, settings), client)  # type: ignore[arg-type]
    await ActivityEnvironment().run(activities.pause_run, PauseRunInput(run_id=run_id, reason=reason))
    assert await state_of(database, run_id) == ("paused", storable_text(reason))
    ending = EndRunInput(run_id=run_id, state=RunState.FAILED, reason=reason)
    assert (await ActivityEnvironment().run(activities.end_run, ending)).ended
    assert await state_of(database, run_id) == ("failed", storable_text(reason))


async def test_a_person_may_type_a_reason_in_another_encoding(database: Database, run_id: str) -> None:
    """An argument of the command line that is no UTF-8 is given to Python with lone surrogates."""
    await make_run(database, run_id, make_config())
    request = Request(run_id, "1", "a test", "caf\udce9")
    async with database.begin() as connection:
        assert (await steering.record_pause(connection, request)).changed
        assert [one.reason for one in await list_requests(connection, run_id)] == ["caf\\udce9"]
    assert await state_of(database, run_id) == ("paused", "paused by a test: caf\\udce9")
