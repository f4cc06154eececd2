"""Full-text search: what the sweep indexes, what a search finds with and without the index, and that it is used."""

from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from reads.text_search import search_run
from store import retention
from store.database import Database
from store.rollout_words import index_rollouts, search_query, words_of
from store.schema import RolloutWordsTable, TurnTable
from tests.integration.viewer.filled_store import FilledRun, fill_run
from viewer.routes import search as search_page


async def search(client: httpx.AsyncClient, filled: FilledRun, words: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/search.json", params={"q": words, "run": filled.run_id})).json()
    return found


@pytest.mark.parametrize(
    "words",
    [
        "first i READ", "an agent wrote", "You mend code", "return a - b\n", "calc.py", "Edit", "mende", "alc", "++",
        "add(a, b):", "'s", "no such text", "a & !b | c:*", "\\'", "",
    ],
)  # fmt: skip
async def test_the_index_changes_no_answer_but_how_much_is_read(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, words: str
) -> None:
    before = await search(client, filled, words)
    assert await index_rollouts(database, 60) == 6
    assert await index_rollouts(database, 60) == 0, "each rollout is indexed once"
    after = await search(client, filled, words)
    if words == "alc":
        assert before["hits"] and not after["hits"], "a search for the middle of a word finds only what is not indexed"
        return
    assert after["hits"] == before["hits"]
    if words:
        assert (before["num_unindexed"], after["num_unindexed"]) == (7, 1), "the open rollout has no words yet"
    if words == "no such text":
        assert before["num_turns"] == 11 and after["num_turns"] == 1


async def test_a_page_says_what_is_not_indexed(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    address = f"/search?q=subtracts&run={filled.run_id}"
    assert "7 rollouts of the run are not indexed yet" in " ".join((await client.get(address)).text.split())
    await index_rollouts(database, 60)
    assert "1 rollout of the run is not indexed yet; its turns" in " ".join((await client.get(address)).text.split())


async def test_a_damaged_turn_does_not_keep_others_from_the_index(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        first = select(func.min(TurnTable.id)).where(TurnTable.rollout_id == filled.unsolved).scalar_subquery()
        await connection.execute(update(TurnTable).where(TurnTable.id == first).values(request=b"no zstd"))
    assert await index_rollouts(database, 60) == 6
    found = {hit["rollout_id"] for hit in (await search(client, filled, "You mend code"))["hits"]}
    assert found == {filled.solved, filled.unsolved, filled.running}, "the other turns say it, too"


async def test_no_time_for_the_index_writes_none(database: Database, filled: FilledRun) -> None:
    assert await index_rollouts(database, 0) == 0


async def test_archived_turns_leave_the_index(database: Database, filled: FilledRun) -> None:
    await index_rollouts(database, 60)
    async with database.begin() as connection:
        counting = select(func.count()).select_from(RolloutWordsTable)
        assert (await connection.execute(counting)).scalar_one() == 2, "four rollouts have no turn"
        await retention.drop_archived_rows(connection, filled.run_id, 0, filled.running)
        assert (await connection.execute(counting)).scalar_one() == 0


async def test_a_run_with_any_name_is_searched(client: httpx.AsyncClient, database: Database, model: Path) -> None:
    filled = await fill_run(database, "a'b\\c & !d:*", model)
    await index_rollouts(database, 60)
    assert {hit["rollout_id"] for hit in (await search(client, filled, "first i"))["hits"]} == {
        filled.solved,
        filled.unsolved,
    }


async def test_all_runs_are_searched_without_the_name_of_one(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await fill_run(database, "other-run", model)
    expected = {(filled.run_id, one) for one in (filled.solved, filled.unsolved)}
    expected |= {("other-run", one) for one in (other.solved, other.unsolved)}

    async def hits() -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        address: str | None = "/search.json?q=first i"
        while address:
            page = (await client.get(address)).json()
            found |= {(hit["run_id"], hit["rollout_id"]) for hit in page["hits"]}
            assert page["run_id"] is None and {one["label"] for one in page["tasks"]} <= {"shop-0"}
            address = page["next_page"] and page["next_page"].replace("/search?", "/search.json?")
        return found

    assert await hits() == expected
    await index_rollouts(database, 60)
    assert await hits() == expected
    monkeypatch.setattr(search_page, "_MAX_HITS", 1)
    assert await hits() == expected, "pages go on behind the last rollout, of any run"
    monkeypatch.setattr(search_page, "_MAX_HITS", 40)
    monkeypatch.setattr(search_page, "_SECONDS", 0)
    assert await hits() == expected, "also if a page has time for one rollout only"
    monkeypatch.setattr(search_page, "_SECONDS", 600)
    html = (await client.get("/search?q=first i")).text
    assert '<a href="/runs/other-run">other-run</a>' in html and "turns of all runs" in html


def test_words_are_short_and_distinct() -> None:
    assert words_of(["Read sandbox_lost.py, read! Über\0", "x" * 100]) == [
        "lost",
        "py",
        "read",
        "sandbox",
        "x" * 40,
        "über",
    ]


def test_parts_of_names_are_words_and_unspaced_scripts_are_searched_in_the_turns() -> None:
    assert words_of(["SandboxLostError HTTPError isNone"]) == [
        "error", "http", "httperror", "is", "isnone", "lost", "none", "sandbox", "sandboxlosterror",
    ]  # fmt: skip
    assert search_query("r", "Error") == "'run:r' & 'error':*"
    assert search_query("r", "修复") is None


async def test_a_search_uses_the_index(database: Database, filled: FilledRun) -> None:
    """Of 5,000 rollouts of a run, or of all runs, the index names the few that have a rare word; no table is read as a
    whole."""
    others = """INSERT INTO rollout (run_id, task_id, member, purpose, workflow_id, harness, temperature, outcome,
        reward, has_words) SELECT run_id, task_id, n, 'train', 'other/' || n, 'h', 1, 'graded', 0, true
        FROM rollout, generate_series(10, 5000) n WHERE id = :solved"""
    words = """INSERT INTO rollout_words SELECT id, array_to_tsvector(ARRAY(
        SELECT 'n' || id || 'x' || k FROM generate_series(1, 30) k)
        || ARRAY['run:' || run_id, 'common']) FROM rollout WHERE has_words"""
    async with database.begin() as connection:
        await connection.execute(text(others), {"solved": filled.solved})
        await connection.execute(text(words))
    await index_rollouts(database, 60)
    async with database.engine.connect() as plain:
        await (await plain.execution_options(isolation_level="AUTOCOMMIT")).exec_driver_sql("ANALYZE")
    async with database.begin() as connection:
        for run_id, rare_or_in_every_rollout in product((filled.run_id, None), ("subtracts", "comm")):
            plans = await plans_of(connection, run_id, rare_or_in_every_rollout)
            assert "ix_rollout_words_words" in plans and "ix_rollout_without_words" in plans, plans
            assert "pk_rollout_words" not in plans and "Seq Scan on rollout" not in plans, plans


async def plans_of(connection: AsyncConnection, run_id: str | None, words: str) -> str:
    """Return the plans of all statements that a search sends."""
    plans: list[str] = []

    def explain(sync: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        if not statement.startswith("EXPLAIN"):
            plans.extend(row[0] for row in sync.exec_driver_sql(f"EXPLAIN {statement}", values))

    engine = connection.engine.sync_engine
    event.listen(engine, "before_cursor_execute", explain)
    try:
        await search_run(connection, run_id, words, None, 40, 0)
    finally:
        event.remove(engine, "before_cursor_execute", explain)
    return "\n".join(plans)
