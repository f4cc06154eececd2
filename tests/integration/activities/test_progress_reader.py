"""The progress of all agents is read with one query."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event

from activities.progress_reader import ProgressReader
from ratchet.errors import StoreUnavailableError
from store import sessions
from store.database import Database
from store.sessions import EngineWait
from tests.integration.training.records import make_config, make_group, make_run
from tests.integration.training.test_regrade import members_of

LIMITS: sessions.SessionLimits = {"max_context_tokens": 100, "max_response_tokens": 10, "min_response_tokens": 1}
NUM_AGENTS = 40
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


async def open_sessions(database: Database, run_id: str) -> list[int]:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [0.0] * NUM_AGENTS)
    rollouts = await members_of(database, group_id)
    async with database.begin() as connection:
        for rollout_id in rollouts:
            session_id = await sessions.open_session(connection, rollout_id, 2, 1.0, "policy", LIMITS)
            waited = EngineWait(NOON, NOON + timedelta(seconds=rollout_id))
            await sessions.add_engine_waits(connection, {session_id: [waited]})
    return rollouts


@contextmanager
def counted(database: Database) -> Iterator[list[str]]:
    """Collect the queries about sessions while the block runs."""
    found: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if "FROM session" in statement:
            found.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(database.engine.sync_engine, "before_cursor_execute", note)


async def test_everybody_gets_an_own_answer_from_one_query(database: Database, run_id: str) -> None:
    rollouts = await open_sessions(database, run_id)
    reader = ProgressReader(database)
    with counted(database) as queries:
        found = await asyncio.gather(*(reader.read(rollout_id, 2) for rollout_id in [*rollouts, *rollouts]))
    assert [one.engine_wait_seconds for one in found] == [float(one) for one in [*rollouts, *rollouts]]
    assert len(queries) == 1


async def test_one_that_stops_waiting_takes_nothing_from_the_others(database: Database, run_id: str) -> None:
    rollout_id, *_ = await open_sessions(database, run_id)
    reader = ProgressReader(database)
    leaves, stays = (asyncio.create_task(reader.read(rollout_id, 2)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert (await stays).engine_wait_seconds == float(rollout_id)
    assert leaves.cancelled()


async def test_a_store_that_is_away_is_everybodys_error_and_the_next_question_is_asked_anew(
    database: Database, run_id: str
) -> None:
    first, second, *_ = await open_sessions(database, run_id)
    away = Database("postgresql://127.0.0.1:1/nothing", 1)
    reader = ProgressReader(away)
    failed = await asyncio.gather(reader.read(first, 2), reader.read(second, 2), return_exceptions=True)
    assert [type(one) for one in failed] == [StoreUnavailableError] * 2
    reader._database = database
    assert (await reader.read(first, 2)).engine_wait_seconds == float(first)
    await away.close()


async def test_an_attempt_without_a_session_fails_alone(database: Database, run_id: str) -> None:
    rollout_id, *_ = await open_sessions(database, run_id)
    reader = ProgressReader(database)
    found, missing = await asyncio.gather(
        reader.read(rollout_id, 2), reader.read(rollout_id, 9), return_exceptions=True
    )
    assert isinstance(found, sessions.SessionProgress)
    with pytest.raises(AssertionError, match="has no session"):
        raise missing  # type: ignore[misc]
