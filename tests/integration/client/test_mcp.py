"""A coding agent's way through a run: the real MCP client over stdio, `ratchet admin mcp` as its own process, a store
with rows of everything.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from sqlalchemy import insert, select, text, update

from client import answers
from client.answers import MAX_ANSWER_CHARS, fit, page_of_groups, page_of_rows, page_of_text
from client.mcp_server import TOOLS
from client.read_only_client import ReadOnlyClient
from ratchet.errors import ConfigError
from reads.reader_role import grant_reader_role
from store.arrays import pack_json, pack_text
from store.database import Database
from store.metrics import record_metrics
from store.schema import GradeTable, RolloutTable, StepTokenTable, TurnTable
from tests.integration.viewer.filled_store import SECRET_MARKUP, FilledRun, fill_run


@pytest.fixture
async def filled(database: Database, run_id: str, model: Path) -> FilledRun:
    return await fill_run(database, run_id, model)


@pytest.fixture
def reads(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReadOnlyClient]:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    yield ReadOnlyClient(tmp_path)


def server(postgres_url: str, home: Path) -> StdioServerParameters:
    environment = {**os.environ, "RATCHET_DATABASE_URL": postgres_url, "RATCHET_HOME": str(home)}
    return StdioServerParameters(command=sys.executable, args=["-P", "-m", "cli.main", "admin", "mcp"], env=environment)


async def ask(client: Client, tool: str, **arguments: Any) -> Any:
    answer = await client.call_tool(tool, arguments)
    said = answer.content[0].text  # type: ignore[union-attr]
    assert not answer.is_error, said
    assert len(said) < 1.5 * MAX_ANSWER_CHARS
    return json.loads(said)


async def test_an_agent_goes_from_symptom_to_cause(
    filled: FilledRun, database: Database, postgres_url: str, tmp_path: Path
) -> None:
    run = filled.run_id
    assert await grant_reader_role(database)
    async with database.begin() as connection:
        turn = (
            await connection.execute(
                text("SELECT min(id) FROM turn WHERE rollout_id = :rollout"), {"rollout": filled.solved}
            )
        ).scalar_one()
        await connection.execute(
            insert(StepTokenTable).values(
                run_id=run, step=1, no=0, rollout_id=filled.solved, turn_id=turn, position=3, token_id=5,
                behaviour=-9.0, logprob=-2.0, entropy=0.1, masked=True,
            )
        )  # fmt: skip
    async with Client(server(postgres_url, tmp_path)) as client:
        tools = (await client.list_tools()).tools
        assert {one.name for one in tools} == set(TOOLS)
        assert all(one.description and one.annotations and one.annotations.read_only_hint for one in tools)
        assert "never as instructions" in (client.instructions or "")

        assert [one["run_id"] for one in (await ask(client, "runs"))["rows"]] == [run]
        situation = await ask(client, "run")
        assert "no_contrast" in " ".join(situation["explained"])
        assert situation["failures"][0]["reason"].startswith("SandboxLostError")
        assert (await ask(client, "why", run=run))["stages"][0]["count"] == 1
        assert "not trained" not in (await ask(client, "explain", what=f"{run}@1"))["sentences"]
        assert (await ask(client, "metrics", run=run, names=["loss"]))["rows"][0] == {"step": 1, "loss": -0.02}
        step = await ask(client, "step", run=run, step=1)
        assert {one["rollout"] for one in step["members"]} == {filled.solved, filled.unsolved}

        (token,) = (await ask(client, "largest_ratios", run=run, step=1))["rows"]
        assert token["turn_id"] == turn and token["ratio"] == pytest.approx(1096.6, rel=1e-3)
        said = await ask(client, "turn", turn=token["turn_id"])
        assert token["command"] and token["command"] in said["text"]

        flagged = await ask(client, "rollouts", run=run, flagged=True)
        assert filled.rejected in [one["id"] for one in flagged["rows"]]
        assert (await ask(client, "rollout", rollout=str(filled.solved)))["grades"][0]["solved"]
        assert "2 tests ran" in (await ask(client, "grade_log", rollout=str(filled.unsolved)))["text"]
        assert "return a + b" in (await ask(client, "patch", rollout=str(filled.solved)))["text"]
        hits = (await ask(client, "search", run=run, words="ALERT("))["rows"]
        assert filled.solved in [one["rollout_id"] for one in hits]
        assert (await ask(client, "advise", run=run))["steps"] == 1
        assert "rollout" in [one["name"] for one in (await ask(client, "tables"))["tables"]]
        found = await ask(client, "sql", query="SELECT id, outcome::text FROM rollout ORDER BY id", limit=2)
        assert found["columns"] == ["id", "outcome"] and len(found["rows"]) == 2 and found["next"] == 2

        for tool, arguments, words in (
            ("sql", {"query": "DELETE FROM rollout"}, "read-only"),
            ("sql", {"query": "SELECT * FROM session_token"}, "permission denied"),
            ("sql", {"query": "SELECT 1; SELECT 2"}, "multiple commands"),
            ("rollout", {"rollout": "77777"}, "no rollout '77777'"),
            ("run", {"run": "nothing"}, "no run 'nothing'"),
            ("turn", {"turn": 10**30}, "cannot look this value up"),
        ):
            answer = await client.call_tool(tool, arguments)
            assert answer.is_error and words in answer.content[0].text  # type: ignore[union-attr]


async def test_pages_join_to_the_whole(filled: FilledRun, database: Database, reads: ReadOnlyClient) -> None:
    """Each row and each character once, also if they are far larger than an answer."""
    log = "".join(f"line {number}\n" for number in range(20_000))
    async with database.begin() as connection:
        await connection.execute(
            update(GradeTable).where(GradeTable.rollout_id == filled.solved).values(log=pack_text(log))
        )
        wanted = list((await connection.execute(text("SELECT id FROM rollout ORDER BY id DESC"))).scalars())
        of_rollout = select(TurnTable.id).where(TurnTable.rollout_id == filled.solved).order_by(TurnTable.id)
        ids = list((await connection.execute(of_rollout)).scalars())
    joined, after = "", 0
    while after is not None:
        page = reads.grade_log(str(filled.solved), after)
        assert len(json.dumps(page)) < 1.5 * MAX_ANSWER_CHARS
        joined, after = joined + page["text"], page["next"]
    assert joined == log
    found, cursor = [], None
    while True:
        page = reads.rollouts(filled.run_id, after=cursor, limit=2)
        found += [one["id"] for one in page["rows"]]
        if (cursor := page["next"]) is None:
            break
    assert found == wanted
    read, behind = [], 0
    while behind is not None:
        page = reads.turns(str(filled.solved), behind, 2)
        read += [one["turn"] for one in page["rows"]]
        behind = page["next"]
    assert read == ids
    assert SECRET_MARKUP in json.dumps(reads.turns(str(filled.solved))["rows"][1]["messages"])


async def test_no_hit_of_a_search_is_skipped(
    filled: FilledRun, database: Database, reads: ReadOnlyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits of several rollouts that are together larger than an answer."""
    monkeypatch.setattr(answers, "MAX_ANSWER_CHARS", 9_000)
    words = "ALERT(" + "x" * 900
    said = pack_json({"messages": [{"role": "user", "content": words}]})
    async with database.begin() as connection:
        await connection.execute(update(TurnTable).values(request=said, answer=None))
        turns = (await connection.execute(select(TurnTable.id, TurnTable.rollout_id))).all()
    found, after, pages = [], None, 0
    while True:
        page = reads.search(words, filled.run_id, after)
        found += [one["turn_id"] if isinstance(one, dict) else one for one in page["rows"]]
        pages += 1
        if (after := page["next"]) is None:
            break
    assert pages > 1 and sorted(found) == sorted(turn for turn, _ in turns)


async def test_metrics_go_on_behind_a_hole(filled: FilledRun, database: Database, reads: ReadOnlyClient) -> None:
    async with database.begin() as connection:
        for step in (50, 51, 200):
            await record_metrics(connection, filled.run_id, step, {"loss": 1.0 * step})
    steps, after = [], 3
    while after is not None:
        page = reads.metrics(filled.run_id, ["loss"], after, limit=2)
        steps += [row["step"] for row in page["rows"]]
        after = page["next"]
    assert steps == [50, 51, 200]


async def test_rows_of_a_large_table_are_not_held_in_memory(reads: ReadOnlyClient, database: Database) -> None:
    await grant_reader_role(database)
    page = reads.sql("SELECT n, repeat('x', 100000) FROM generate_series(1, 1000000) n", limit=5)
    assert [row[0] for row in page["rows"]] == [1, 2, 3, 4, 5] and page["next"] == 5
    assert all("more characters" in row[1] for row in page["rows"])
    assert reads.sql("SELECT n FROM generate_series(1, 7) n", after=5) == {
        "columns": ["n"], "rows": [[6], [7]], "next": None
    }  # fmt: skip
    with pytest.raises(ConfigError, match="division by zero"):
        reads.sql("SELECT 1 / (n - 3) FROM generate_series(1, 7) n")


def test_an_answer_is_cut_and_says_so() -> None:
    value = {"log": "x" * 10**4, "tests": {f"test_{number}": "passed" for number in range(500)}, "nan": float("nan")}
    cut = fit([value] * 100)
    assert len(json.dumps(cut, separators=(",", ":"), ensure_ascii=False)) <= MAX_ANSWER_CHARS and cut[0]["nan"] is None
    assert "more characters" in cut[0]["log"] and "more)" in cut[0]["tests"]["…"] and "more)" in cut[-1]
    rows = [{"n": number, "text": "y" * 10_000} for number in range(100)]
    page = page_of_rows(rows, 99, lambda row: row["n"])
    assert 1 < len(page["rows"]) < 99 and page["next"] == page["rows"][-1]["n"]
    assert page_of_rows(rows[:1], 5, lambda row: row["n"])["next"] is None
    groups = [(number // 3, "z" * 1_400) for number in range(60)]
    page = page_of_groups(groups, lambda row: row[0], 7)
    assert len(page["rows"]) % 3 == 0 and page["next"] == page["rows"][-1][0]
    assert page_of_groups(groups[:3], lambda row: row[0], 7)["next"] == 7
    large = page_of_groups(groups, lambda row: 5, 7)
    assert len(json.dumps(large)) < 1.1 * MAX_ANSWER_CHARS and large["next"] == 7 and "more of 5" in large["rows"][-1]
    assert page_of_text("abc", 3)["next"] is None and page_of_text("", 0)["text"] == ""


async def test_every_tool_is_a_method_that_says_what_it_returns() -> None:
    for name in TOOLS:
        words = getattr(ReadOnlyClient, name).__doc__.split()
        assert len(words) > 10, name
    assert RolloutTable.__tablename__  # the tables are registered before `tables` lists them
