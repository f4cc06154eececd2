"""The time for which a rollout has had boxes: outages, waits and the time without a box do not count."""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from store import adapters, outages, sandboxes, sessions
from store.box_failures import ENDED_BY_HOST
from store.database import Database
from store.outages import Outage
from store.schema import (
    AdapterProcessTable,
    InstallationTable,
    OutageTable,
    RolloutTable,
    SandboxTable,
    SessionTable,
    SessionTokenTable,
    TurnTable,
)
from store.sessions import EngineWait, SessionProgress
from tests.integration.training.records import make_config, make_group, make_run

HOUR = 3600.0


@pytest.fixture
async def rollout(database: Database, run_id: str) -> tuple[int, str]:
    """Id and workflow of a rollout without boxes or sessions."""
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        await make_group(connection, run_id, 0, [0.0, 1.0])
        await connection.execute(update(RolloutTable).values(outcome=None, reward=None))
        await connection.execute(update(SessionTable).values(state="closed"))
        found = (await connection.execute(select(RolloutTable.id, RolloutTable.workflow_id).limit(1))).one()
    return found.id, found.workflow_id


async def box(database: Database, rollout: tuple[int, str], began: float, ended: float | None, **more: object) -> None:
    """Insert a box that was requested five minutes before it lived. Hours before now; `ended` None: it still lives."""
    values: Mapping[str, object] = {
        "provider": "p",
        "provider_id": "i1234567890",
        "role": "agent",
        "rollout_id": rollout[0],
        "workflow_id": rollout[1],
        "attempt": 1,
        "image": "i",
        "state": "live" if ended is None else "released",
        "created_at": func.now() - timedelta(hours=began, minutes=5),
        "live_at": func.now() - timedelta(hours=began),
        "released_at": None if ended is None else func.now() - timedelta(hours=ended),
        **more,
    }
    async with database.begin() as connection:
        await connection.execute(insert(SandboxTable).values(values))


async def away(database: Database, part: str, began: float, ended: float) -> None:
    async with database.begin() as connection:
        now: datetime = (await connection.execute(select(func.now()))).scalar_one()
        outage = Outage(part, now - timedelta(hours=began), now - timedelta(hours=ended))
        for _ in range(2):  # repeated after a commit whose confirmation was lost
            await outages.record_outages(connection, [outage])


async def hours(database: Database, rollout: tuple[int, str]) -> float:
    async with database.begin() as connection:
        return round(await outages.seconds_with_a_box(connection, *rollout) / HOUR, 2)


async def test_without_a_box_no_time_passes(database: Database, rollout: tuple[int, str]) -> None:
    await box(database, rollout, 9, None, live_at=None, state="creating")
    assert await hours(database, rollout) == 0


async def test_boxes_count_while_they_live_and_at_once_only_once(database: Database, rollout: tuple[int, str]) -> None:
    await box(database, rollout, 9, 8)
    await box(database, rollout, 5, 3)
    await box(database, rollout, 4, 2, role="grade")
    await box(database, rollout, 1, None)
    await box(database, rollout, 99, 1, workflow_id="regrade/other")
    assert await hours(database, rollout) == 1 + 3 + 1


async def test_a_box_that_cannot_be_killed_yet_costs_no_time(database: Database, rollout: tuple[int, str]) -> None:
    await box(database, rollout, 5, None)
    await box(database, rollout, 4, None)
    async with database.begin() as connection:
        wanted = await sandboxes.want_release_of_rollout(connection, rollout[0], "the rollout ended")
        an_hour_ago = {"released_at": SandboxTable.released_at - timedelta(hours=1)}
        await connection.execute(update(SandboxTable).values(an_hour_ago))
    assert len(wanted) == 2
    assert await hours(database, rollout) == 4
    async with database.begin() as connection:
        await sandboxes.mark_released(connection, wanted[0].id)
    assert await hours(database, rollout) == 4


async def test_outages_are_left_out_however_they_overlap(database: Database, rollout: tuple[int, str]) -> None:
    await box(database, rollout, 10, 4)
    await away(database, "postgres", 12, 11)  # before it
    await away(database, "gateway", 11, 9)  # one hour of it
    await away(database, "worker", 8, 6)
    await away(database, "temporal", 7, 5)  # three hours together
    await away(database, "adapter", 3, 2)  # after it
    assert await hours(database, rollout) == 6 - 1 - 3


async def test_an_outage_of_one_host_of_boxes_is_that_of_its_boxes(
    database: Database, rollout: tuple[int, str]
) -> None:
    await box(database, rollout, 10, 6, provider_id="i123456aaa")
    await box(database, rollout, 5, 3, provider_id="iabcdefaaa")
    await away(database, "gateway 10.0.0.2 i123456", 9, 4)  # three hours of the first box, none of the second
    await away(database, "gateway 10.0.0.3 i654321", 10, 2)
    assert await hours(database, rollout) == 4 - 3 + 2
    await away(database, "gateway", 4, 3)
    assert await hours(database, rollout) == 4 - 3 + 1


async def test_an_outage_that_ends_before_it_begins_has_no_length(database: Database, rollout: tuple[int, str]) -> None:
    """The clock of a watcher was set back."""
    await box(database, rollout, 10, None)
    await away(database, "worker", 6, 8)
    assert await hours(database, rollout) == 10


async def test_an_outages_end_moves_on_and_never_back(database: Database, rollout: tuple[int, str]) -> None:
    await box(database, rollout, 10, None)
    async with database.begin() as connection:
        began = (await connection.execute(select(func.now() - timedelta(hours=8)))).scalar_one()
        for length in (1, 3, 2):
            await outages.record_outages(connection, [Outage("worker", began, began + timedelta(hours=length))])
        assert (await connection.execute(select(func.count()).select_from(OutageTable))).scalar_one() == 1
    assert await hours(database, rollout) == 7


async def test_what_agents_wait_for_is_left_out(database: Database, rollout: tuple[int, str]) -> None:
    """Waits for an engine of every session; time without an adapter of the open one, by the adapters' heartbeats."""
    await box(database, rollout, 10, None)
    await waited(database, rollout, 9, 7)
    mine = update(SessionTable).where(SessionTable.rollout_id == rollout[0])
    async with database.begin() as connection:
        here = {"adapter_away_seconds": 3 * HOUR, "adapter_seen_at": func.now() + timedelta(hours=1)}
        await connection.execute(insert(InstallationTable).values(here))
    assert await hours(database, rollout) == 8
    async with database.begin() as connection:
        await connection.execute(mine.values(state="open", away_before=0))
    assert await hours(database, rollout) == 5


async def test_a_heartbeat_of_a_clock_that_was_ahead_hides_no_outage(database: Database) -> None:
    """The server's clock was an hour ahead for some seconds: the next heartbeat is taken as it is."""
    for ahead, is_set_back in ((timedelta(hours=1), True), (timedelta(seconds=5), False)):
        async with database.begin() as connection:
            seen = insert(InstallationTable).values(singleton=True, adapter_seen_at=func.now() + ahead)
            changes = {"adapter_seen_at": func.now() + ahead}
            await connection.execute(seen.on_conflict_do_update(index_elements=["singleton"], set_=changes))
            await adapters.heartbeat_adapters(connection)
            seconds = func.extract("epoch", InstallationTable.adapter_seen_at - func.clock_timestamp())
            left = (await connection.execute(select(seconds))).scalar_one()
        assert (left <= 0) == is_set_back


async def test_time_without_an_adapter_counts_once_and_stays_so_when_the_session_is_closed(
    database: Database, rollout: tuple[int, str]
) -> None:
    """The adapters were away for four hours, which the watcher records one after the other."""
    await box(database, rollout, 10, None)
    mine = update(SessionTable).where(SessionTable.rollout_id == rollout[0])
    async with database.begin() as connection:
        here = {"adapter_away_seconds": 4 * HOUR, "adapter_seen_at": func.now() + timedelta(hours=1)}
        await connection.execute(insert(InstallationTable).values(here))
        session = (await connection.execute(mine.values(state="open", away_before=0).returning(SessionTable.id))).one()
        token = {"token_hash": b"t", "session_id": session.id, "created_at": func.now() - timedelta(hours=9)}
        await connection.execute(insert(SessionTokenTable).values(token))
    assert await hours(database, rollout) == 6
    await away(database, "adapter", 8, 6)
    await away(database, "postgres", 7, 5)
    assert await hours(database, rollout) == 10 - 3 - 1  # one hour was not recorded
    await away(database, "adapter", 4, 3)
    assert await hours(database, rollout) == 6
    await away(database, "gateway", 2, 1)  # calls went on meanwhile
    await away(database, "postgres", 11, 9.5)
    assert await hours(database, rollout) == 6 - 1 - 0.5
    async with database.begin() as connection:
        await connection.execute(mine.values(state="closed"))
    assert await hours(database, rollout) == 6 - 1 - 0.5


async def waited(database: Database, rollout: tuple[int, str], began: float, ended: float) -> None:
    """Let the rollout's session have waited for an engine; hours before now. Written twice, as after a lost commit."""
    async with database.begin() as connection:
        now: datetime = (await connection.execute(select(func.now()))).scalar_one()
        found = select(SessionTable.id).where(SessionTable.rollout_id == rollout[0])
        wait = EngineWait(now - timedelta(hours=began), now - timedelta(hours=ended))
        session_id = (await connection.execute(found)).scalar_one()
        for _ in range(2):
            assert await sessions.add_engine_waits(connection, {session_id: [wait]}) == {session_id}


async def test_a_wait_for_an_engine_that_overlaps_an_outage_is_left_out_once(
    database: Database, rollout: tuple[int, str]
) -> None:
    await box(database, rollout, 10, None)
    await away(database, "temporal", 8, 6)
    await waited(database, rollout, 9, 7)
    assert await hours(database, rollout) == 10 - 3
    await waited(database, rollout, 7, 6)  # wholly within the outage
    assert await hours(database, rollout) == 10 - 3
    await waited(database, rollout, 5, 4)
    await waited(database, rollout, 11, 9.5)  # half an hour of it with a box
    assert await hours(database, rollout) == 10 - 3 - 1 - 0.5
    async with database.begin() as connection:
        seconds = select(SessionTable.engine_wait_seconds).where(SessionTable.rollout_id == rollout[0])
        assert round((await connection.execute(seconds)).scalar_one() / HOUR, 2) == 3 + 1 + 1.5


async def test_a_wait_in_a_gap_of_the_heartbeats_extends_a_deadline_once(
    database: Database, rollout: tuple[int, str]
) -> None:
    """The only adapter stood still for two hours in which a call waited for an engine; it had waited an hour before."""
    await box(database, rollout, 10, None)
    async with database.begin() as connection:
        await connection.execute(insert(InstallationTable).values(adapter_seen_at=func.now() - timedelta(hours=2)))
        opened = {"state": "open", "away_before": 0, "created_at": func.now() - timedelta(hours=9)}
        mine = update(SessionTable).where(SessionTable.rollout_id == rollout[0]).values(opened)
        session = (await connection.execute(mine.returning(SessionTable.id, SessionTable.attempt))).one()
        token = {"token_hash": b"t", "session_id": session.id, "created_at": func.now() - timedelta(hours=9)}
        await connection.execute(insert(SessionTokenTable).values(token))
        await adapters.heartbeat_adapters(connection)
    await waited(database, rollout, 3, 0)
    key = (rollout[0], session.attempt)
    async with database.begin() as connection:
        progress = (await sessions.read_progress(connection, [key]))[key]
    assert [round(one / HOUR, 2) for one in (progress.engine_wait_seconds, progress.away_seconds)] == [3, 2]
    assert round(progress.waited_seconds / HOUR, 2) == 3
    assert await hours(database, rollout) == 7


async def test_a_suspension_counts_once_with_a_wait_and_the_silence_of_an_adapter(
    database: Database, rollout: tuple[int, str]
) -> None:
    """The agent's call waited for an engine for an hour when the adapter's process was killed; the agent was suspended
    an hour later, and another adapter works."""
    await box(database, rollout, 10, None)
    async with database.begin() as connection:
        opened = {"state": "open", "away_before": 0, "created_at": func.now() - timedelta(hours=9)}
        mine = update(SessionTable).where(SessionTable.rollout_id == rollout[0]).values(opened)
        session = (await connection.execute(mine.returning(SessionTable.id, SessionTable.attempt))).one()
        await connection.execute(
            insert(AdapterProcessTable).values(id="killed", alive_until=func.now() - timedelta(hours=4))
        )
        in_flight = {"state": "in_flight", "worker": "killed", "completed_at": None}
        in_flight |= {"created_at": func.now() - timedelta(hours=5)}
        of_session = update(TurnTable).where(TurnTable.session_id == session.id)
        assert (await connection.execute(of_session.values(in_flight))).rowcount
    await waited(database, rollout, 5, 4)
    key = (rollout[0], session.attempt)

    async def progress() -> SessionProgress:
        async with database.begin() as connection:
            return (await sessions.read_progress(connection, [key]))[key]

    before = await progress()
    assert [round(one / HOUR, 2) for one in (before.engine_wait_seconds, before.silent_seconds)] == [1, 4]
    for _ in range(2):
        async with database.begin() as connection:
            await outages.add_suspension(connection, session.id, 3 * HOUR)
    after = await progress()
    assert [round(one / HOUR, 2) for one in (after.engine_wait_seconds, after.silent_seconds)] == [1 + 3, 1]
    assert round(after.waited_seconds / HOUR, 2) == round(before.waited_seconds / HOUR, 2) == 5
    assert await hours(database, rollout) == 10 - 4


async def test_a_gap_of_the_heartbeats_stays_left_out_without_a_watcher(
    database: Database, rollout: tuple[int, str]
) -> None:
    """Its session is closed, and no probe has recorded an outage."""
    await box(database, rollout, 10, None)
    async with database.begin() as connection:
        await connection.execute(insert(InstallationTable).values(adapter_seen_at=func.now() - timedelta(hours=2)))
        for _ in range(2):
            await adapters.heartbeat_adapters(connection)
    assert await hours(database, rollout) == 8


@pytest.mark.parametrize(
    ("table", "mode", "stops_calls"),
    [
        ("turn", "SHARE", True),  # CREATE INDEX
        ("session", "ACCESS EXCLUSIVE", True),  # ALTER TABLE, VACUUM FULL
        ("rollout", "SHARE", True),  # a session's first call notes its template there
        ("session_token", "ACCESS EXCLUSIVE", True),
        ("turn", "SHARE UPDATE EXCLUSIVE", False),  # VACUUM, CREATE INDEX CONCURRENTLY
        ("task", "ACCESS EXCLUSIVE", False),
    ],
)
async def test_no_heartbeat_is_sent_while_a_lock_stops_calls(
    database: Database, table: str, mode: str, stops_calls: bool
) -> None:
    async def beat() -> None:
        async with database.begin() as connection:
            await adapters.heartbeat_adapters(connection)

    async def num_waiting() -> int:
        async with database.begin() as connection:
            waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = to_regclass(:table)")
            return int((await connection.execute(waiting, {"table": table})).scalar_one())

    await beat()
    async with database.begin() as holder:
        await holder.exec_driver_sql(f"LOCK TABLE {table} IN {mode} MODE")
        beating = asyncio.create_task(beat())
        async with asyncio.timeout(30):
            while not beating.done() and not await num_waiting():
                await asyncio.sleep(0.05)
        assert beating.done() is not stops_calls
    await beating


async def test_the_gateways_outages_since_an_agent_began(database: Database, rollout: tuple[int, str]) -> None:
    """They count once if they overlap, from the session's first token on, and only those of the gateway."""
    async with database.begin() as connection:
        session_id = (
            await connection.execute(select(SessionTable.id).where(SessionTable.rollout_id == rollout[0]).limit(1))
        ).scalar_one()
        await connection.execute(
            insert(SessionTokenTable).values(
                token_hash=b"of-the-gateways-test", session_id=session_id, created_at=func.now() - timedelta(hours=4)
            )
        )
    await away(database, "gateway", 6, 3.5)
    await away(database, "gateway", 2, 1)
    await away(database, "gateway 10.0.0.2 i123456", 2.5, 1.5)
    await away(database, "gateway 10.0.0.3 iabcdef", 4, 0)
    await away(database, "adapter", 3, 2)
    async with database.begin() as connection:
        seconds = [
            await outages.gateway_away_seconds(connection, session_id, f"{i}7890") for i in ("i654321", "i123456")
        ]
    assert seconds == [pytest.approx(hours * HOUR, abs=5) for hours in (1.5, 2)]


async def test_a_box_that_its_workers_machine_ended_does_not_count(
    database: Database, rollout: tuple[int, str]
) -> None:
    await box(database, rollout, 9, 5, release_reason=ENDED_BY_HOST)
    await box(database, rollout, 4, 3, release_reason="suspect patch")
    await box(database, rollout, 3.5, 2, release_reason=ENDED_BY_HOST)
    assert await hours(database, rollout) == 1


async def test_tokens_of_one_session_are_added_at_once(database: Database, rollout: tuple[int, str]) -> None:
    """An agent's start and a chat's client add one each, and both may be the first."""
    values = {"rollout_id": rollout[0], "temperature": 1.0, "model": "m", "limits": {}}

    async def add(session_id: int) -> str:
        async with database.begin() as connection:
            return await sessions.add_token(connection, session_id)

    async with database.begin() as connection:
        new = insert(SessionTable).values([{**values, "attempt": attempt} for attempt in range(50, 70)])
        ids = list((await connection.execute(new.returning(SessionTable.id))).scalars())
    for session_id in ids:
        added = await asyncio.gather(*(add(session_id) for _ in range(4)))
        assert len(set(added)) == 4
