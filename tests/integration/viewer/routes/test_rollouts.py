"""The list of rollouts with its orders and filters, and the page of one."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert, select, update

from ratchet.tracing import RolloutTrace
from ratchet.types import CHAT, policy_version
from store.arrays import pack_text
from store.database import Database
from store.installations import installation_id
from store.schema import BatchTable, PatchTable, RolloutTable, RunTable, TurnTable
from tests.integration.ratchet_command import Ratchet
from tests.integration.viewer.filled_store import FilledRun, RunFiller, result, said, tool_call
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

NUM_TURNS = 530


async def test_every_turn_of_a_long_rollout_is_reached(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        rollout = await filler.rollout(filled.open_group, filled.task, 7, outcome="graded", reward=0.0)
        session = await filler.session(rollout)
        before = None
        for number in range(NUM_TURNS):
            before = await filler.turn(session, rollout, number, [], said("Yes."), before)
        statement = select(TurnTable.id).where(TurnTable.rollout_id == rollout).order_by(TurnTable.id)
        ids = list((await connection.execute(statement)).scalars())
    for at in (0, 24, 25, 26, 499, 500, 515, NUM_TURNS - 1):
        linked = await client.get(f"/rollouts/{rollout}/turns/{ids[at]}")
        assert linked.status_code == 303, at
        html = (await client.get(linked.headers["location"])).text
        assert f'id="turn-{ids[at]}"' in html and f">Turn {at + 1}</a>" in html, at
        assert at < 25 or f'id="turn-{ids[at - 1]}"' in html, "it begins with the turn before"
    assert (await client.get(f"/rollouts/{rollout}/turns/{ids[-1] + 1}")).status_code == 404
    assert (await client.get(f"/rollouts/{filled.solved}/turns/{ids[0]}")).status_code == 404

    numbers: list[int] = []
    address: str | None = f"/rollouts/{rollout}"
    while address:
        path, _, query = address.partition("?")
        page = (await client.get(f"{path}.json?{query}")).json()
        numbers += [turn["number"] for turn in page["turns"]]
        address = page["next_page"]
        assert len(numbers) <= NUM_TURNS
    assert numbers == list(range(1, NUM_TURNS + 1))
    assert "first 500 of 530 turns" in (await client.get(f"/rollouts/{rollout}")).text


async def test_an_empty_patch_is_told_with_the_last_calls(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path, ratchet: Ratchet
) -> None:
    ended = {"outcome": "graded", "agent_exit": "done", "reward": 0.0, "num_turns": 2}
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        rollout = await filler.rollout(filled.open_group, filled.task, 7, **ended)
        session = await filler.session(rollout)
        edit = said("", tool_call(1, "Edit", file_path="calc.py", old_string="x", new_string="y"))
        before = await filler.turn(session, rollout, 0, [], edit, None)
        await filler.turn(session, rollout, 1, [result(1, "(no output)")], said("Done."), before)
        empty = {"attempt": 1, "base_commit": "c0ffee", "diff": pack_text(""), "num_bytes": 0, "num_files": 0}
        await connection.execute(insert(PatchTable).values(rollout_id=rollout, **empty))
    cause = "empty: its calls, 1: `Edit calc.py` gave (no output)"
    assert cause in (await client.get(f"/rollouts/{rollout}")).text
    for command in ("show rollout", "explain"):
        said_by = ratchet(*command.split(), str(rollout), RATCHET_DATABASE_URL=database.url).output
        assert cause in " ".join(said_by.split()), command
    reason = "the diff of 9 bytes is above limits.max_patch_bytes (1)"
    async with database.begin() as connection:
        await connection.execute(update(PatchTable).where(PatchTable.rollout_id == rollout).values(reason=reason))
    page = (await client.get(f"/rollouts/{rollout}")).text
    assert reason in page and "empty" not in page.partition('id="patch"')[2].partition("</section>")[0]
    assert "is empty" not in ratchet("explain", str(rollout), RATCHET_DATABASE_URL=database.url).output
    assert (await client.get(f"/rollouts/{filled.solved}.json")).json()["facts"]["why_empty"] == ""


async def test_the_page_links_to_the_rollouts_trace(database: Database, filled: FilledRun) -> None:
    async with database.begin() as connection:
        trace = RolloutTrace.of(await installation_id(connection), filled.solved)
    link = '<a href="https://traces.example/{}">trace</a>'
    for url in ("https://traces.example/{trace_id}", ""):
        app = create_viewer_app(ViewerSettings(database.url, trace_url=url))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8420") as client,
        ):
            html = (await client.get(f"/rollouts/{filled.solved}")).text
            assert (link.format(trace.hex) in html) == (">trace</a>" in html) == bool(url)
            assert (await client.get(f"/rollouts/{filled.solved}.json")).json()["trace_id"] == trace.hex


async def test_rollouts_are_listed_by_their_duration(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        lasting = {filled.failed: "3 hours", filled.solved: "2 hours"}
        for rollout_id, duration in lasting.items():
            await connection.exec_driver_sql(
                f"UPDATE rollout SET ended_at = created_at + interval '{duration}',"
                f" timings = '{{\"agent\": 6000}}' WHERE id = {rollout_id}"
            )
    address = f"/rollouts.json?run={filled.run_id}&sort=longest"
    ids = [one["id"] for one in (await client.get(address)).json()["rollouts"]]
    assert ids[:3] == [filled.failed, filled.solved, filled.running] and len(ids) == 7
    behind = (await client.get(f"{address}&before={filled.solved}")).json()
    assert [one["id"] for one in behind["rollouts"]] == ids[2:]
    ended = (await client.get(f"{address}&outcome=graded")).json()
    assert ended["rollouts"][0]["id"] == filled.solved
    html = (await client.get(address.replace(".json", ""))).text
    assert "agent <span" in html and "1 h 40 min" in html and "so far" in html


async def test_a_list_of_a_run_begins_with_what_ended_last(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        for rollout_id, minutes in ((filled.unsolved, 1), (filled.rejected, 2)):
            await connection.exec_driver_sql(
                f"UPDATE rollout SET ended_at = now() - interval '{minutes} minutes' WHERE id = {rollout_id}"
            )
    address = re.search(r'href="([^"]*)">Rollouts</a>\s+<a href', (await client.get(f"/runs/{filled.run_id}")).text)
    assert address is not None
    listed = unescape(address[1])
    ids = [one["id"] for one in (await client.get(listed.replace("?", ".json?"))).json()["rollouts"]]
    assert ids[:2] == [filled.unsolved, filled.rejected] and ids[-1] == filled.running and len(ids) == 7
    behind = (await client.get(f"{listed.replace('?', '.json?')}&before={ids[2]}")).json()["rollouts"]
    assert [one["id"] for one in behind] == ids[3:]
    assert "What ended last first" in (await client.get(listed)).text


async def test_rollouts_are_found_by_stage_and_by_label(client: httpx.AsyncClient, filled: FilledRun) -> None:
    async def page(query: str) -> dict[str, Any]:
        found: dict[str, Any] = (await client.get(f"/rollouts.json?run={filled.run_id}&{query}")).json()
        return found

    working = await page("stage=agent works")
    assert [one["id"] for one in working["rollouts"]] == [filled.running]
    assert working["stages"] == {str(filled.running): "agent works"}
    assert (await page("stage=not started"))["rollouts"] == []
    assert len((await page("task=SHOP-0"))["rollouts"]) == len((await page(f"task={filled.task}"))["rollouts"]) == 7
    assert (await page("task=shop-1"))["rollouts"] == []
    html = (await client.get(f"/runs/{filled.run_id}")).text
    assert f"/rollouts?run={filled.run_id}&stage=agent%20works" in html


async def test_calls_of_an_open_rollout_are_counted(
    client: httpx.AsyncClient, filled: FilledRun, database: Database
) -> None:
    async with database.begin() as connection:
        await connection.exec_driver_sql(f"UPDATE turn SET state = 'completed' WHERE rollout_id = {filled.running}")
    listed = (await client.get(f"/rollouts.json?run={filled.run_id}&outcome=open")).json()["rollouts"]
    assert [one["num_turns"] for one in listed] == [1]
    html = (await client.get(f"/groups/{filled.open_group}")).text
    assert "1 turn<" in html


async def test_a_group_has_one_number_on_every_page(client: httpx.AsyncClient, filled: FilledRun) -> None:
    number = 0
    assert filled.trained_group != number
    link = f'<a href="/groups/{filled.trained_group}">{number}</a>'
    step = (await client.get(f"/runs/{filled.run_id}/steps/1")).text
    assert step.count(link) == 3, "as a group, and for each of its two rollouts"
    assert link in (await client.get(f"/rollouts?run={filled.run_id}")).text
    rollout = (await client.get(f"/rollouts/{filled.solved}")).text
    assert f'<a href="/groups/{filled.trained_group}">group {number}</a>' in rollout
    html = (await client.get(f"/groups/{filled.trained_group}")).text
    assert f"<h1>Group {number} " in html and f"of the run (id {filled.trained_group})" in html
    head = (await client.get(f"/rollouts/{filled.solved}.json")).json()["facts"]["rollout"]
    group = (await client.get(f"/groups/{filled.trained_group}.json")).json()["group"]
    for found in (head, group):
        assert (found["group_no"], found["group_id"]) == (number, filled.trained_group)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"training": {"negative_weight": 0}}, "training.negative_weight is 0"),
        ({"loss": {"preset": "sft"}}, "loss.preset is sft"),
        ({"training": {"truncated": "mask"}}, "training.truncated is mask"),
        ({}, "on 0 trained tokens."),
    ],
)
async def test_a_rollout_without_trained_tokens_says_by_which_key(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, rules: dict[str, dict[str, Any]], words: str
) -> None:
    async with database.begin() as connection:
        members = (await connection.execute(select(BatchTable.members))).scalar_one()
        untrained = [
            one | ({"num_tokens": 0, "advantage": 0.0} if one["rollout_id"] == filled.unsolved else {})
            for one in members
        ]
        await connection.execute(update(BatchTable).values(members=untrained))
        config = (await connection.execute(select(RunTable.config))).scalar_one()
        changed = {part: config[part] | rules.get(part, {}) for part in ("training", "loss")}
        await connection.execute(update(RunTable).values(config=config | changed))
        limited = update(RolloutTable).where(RolloutTable.id == filled.unsolved).values(agent_exit="turn_limit")
        await connection.execute(limited)
    page = (await client.get(f"/rollouts/{filled.unsolved}.json")).json()
    assert words in page["why"][-1]["text"]
    trained = (await client.get(f"/rollouts/{filled.solved}.json")).json()
    assert "config" not in trained["why"][-1]["text"]
    assert trained["versions"] == [policy_version(filled.run_id, 0, 0)]


async def test_a_rollout_by_hand_does_not_belong_to_an_evaluation(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    for harness, told in (("bash_agent", "was started by hand"), (CHAT, "is a chat with a person")):
        async with database.begin() as connection:
            by_hand = update(RolloutTable).where(RolloutTable.id == filled.running)
            await connection.execute(by_hand.values(group_id=None, purpose="eval", harness=harness))
        page = (await client.get(f"/rollouts/{filled.running}")).text
        assert f"It {told}, so nothing is trained on it." in page and "belongs to an evaluation" not in page
