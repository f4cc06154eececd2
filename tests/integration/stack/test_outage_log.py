"""The watcher records an outage from the last answer to the first one afterwards, also if the watcher dies."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from ratchet.errors import StoreUnavailableError
from stack.outage_log import OutageLog
from stack.part_health import HealthState, PartHealth, health_written_at, write_health
from stack.parts import Stack
from stack.watcher import Watcher
from store.database import Database
from store.schema import OutageTable

Recorded = list[tuple[str, float, float]]


@pytest.fixture
def stack(tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    return Stack(tmp_path)


def part(name: str) -> PartHealth:
    """A part that has answered until second 10."""
    health = PartHealth(name)
    health.see_process(1, 1.0, True, 0.0, "")
    health.see_success("", 10.0)
    return health


async def recorded(database: Database) -> Recorded:
    async with database.begin() as connection:
        rows = await connection.execute(select(OutageTable).order_by(OutageTable.part, OutageTable.began_at))
        return [(row.part, row.began_at.timestamp(), row.ended_at.timestamp()) for row in rows]


async def test_an_outage_lasts_from_the_last_answer_to_the_next_one(stack: Stack, database: Database) -> None:
    health, log = part("gateway"), OutageLog(stack)
    log.see({"gateway": health}, 11.0)
    assert not log.is_due
    health.see_failure("slow", 20.0)
    log.see({"gateway": health}, 20.0)
    assert log.is_due
    await log.write()
    assert await recorded(database) == [("gateway", 10.0, 20.0)]
    health.see_process(2, 2.0, True, 30.0, "")  # it ends by itself, and another one answers
    health.see_success("", 34.5)
    log.see({"gateway": health}, 35.0)
    health.see_success("", 36.0)
    log.see({"gateway": health}, 37.0)
    await log.write()
    assert await recorded(database) == [("gateway", 10.0, 34.5)]


async def test_an_outage_has_no_negative_length_if_the_clock_is_set_back(stack: Stack, database: Database) -> None:
    health, log = part("gateway"), OutageLog(stack)
    health.see_failure("slow", 5.0)
    log.see({"gateway": health}, 5.0)
    await log.write()
    assert await recorded(database) == [("gateway", 10.0, 10.0)]


async def test_an_outage_of_postgres_is_written_afterwards(
    stack: Stack, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    health, log = part("postgres"), OutageLog(stack)
    health.see_failure("refused", 12.0)
    log.see({"postgres": health}, 12.0)
    with monkeypatch.context() as away:
        away.setenv("RATCHET_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
        with pytest.raises(StoreUnavailableError):
            await log.write()
    health.see_success("", 60.0)
    log.see({"postgres": health}, 61.0)
    await log.write()
    assert await recorded(database) == [("postgres", 10.0, 60.0)]


async def test_the_next_watcher_finds_the_same_beginning(stack: Stack, database: Database) -> None:
    """It reads the parts' last answers from its file; a whole stack that was down has been away as well."""
    health = part("worker")
    health.see_failure("hung", 15.0)
    first = OutageLog(stack)
    first.see({"worker": health}, 15.0)
    await first.write()
    second = OutageLog(stack)
    health.see_process(7, 7.0, True, 4000.0, "")
    second.see({"worker": health}, 4001.0)
    health.see_success("", 4002.0)
    second.see({"worker": health}, 4003.0)
    await second.write()
    assert await recorded(database) == [("worker", 10.0, 4002.0)]


async def test_a_gateway_behind_a_front_has_outages_of_its_own(stack: Stack, database: Database) -> None:
    names = ("gateway", "gateway 10.0.0.2 i123456", "gateway 10.0.0.3 iabcdef")
    health, log = {name: part(name) for name in names}, OutageLog(stack)
    health[names[1]].see_failure("", 20.0)
    log.see(health, 20.0)
    await log.write()
    assert await recorded(database) == [(names[1], 10.0, 20.0)]


async def test_what_rollouts_do_not_need_is_not_recorded(stack: Stack, database: Database) -> None:
    log = OutageLog(stack)
    for name in ("viewer", "temporal-ui", "learner", "engine"):
        health = part(name)
        health.see_failure("", 20.0)
        log.see({name: health}, datetime.now(UTC).timestamp())
    fresh = PartHealth("worker")  # it has never answered: nothing was lost
    log.see({"worker": fresh}, 20.0)
    assert not log.is_due and not await recorded(database)


async def test_time_in_which_no_watcher_ran_is_an_outage(stack: Stack, database: Database) -> None:
    """The machine was suspended: every part stood still with the watcher, so that none of them was seen to fail."""
    write_health(stack.home, [part("worker")], 100.0)
    watcher, stop = Watcher(stack), asyncio.Event()
    watcher.health["worker"].enter(HealthState.FAILING, 90.0)
    watching = asyncio.create_task(watcher.run(stop))
    async with asyncio.timeout(60):
        while health_written_at(stack.home) == 100.0:
            await asyncio.sleep(0.01)
    stop.set()
    await watching
    await watcher.outages.write()
    (gap,) = await recorded(database)
    assert gap[:2] == ("watcher", 100.0) and gap[2] > 1e9, "from the last look of any watcher until now"
    assert watcher.health["worker"].counted_from > 1e9, "nor does the part's own time limit count it"


def test_a_look_that_is_a_little_late_is_no_gap(stack: Stack) -> None:
    watcher = Watcher(stack)
    assert watcher._see_gap(1000.0, 1003.9) == 1003.9 and not watcher.outages.is_due
    assert watcher._see_gap(1003.9, 900.0) == 900.0 and not watcher.outages.is_due, "the clock was set back"
    watcher._see_gap(900.0, 931.0)
    assert watcher.outages.is_due
