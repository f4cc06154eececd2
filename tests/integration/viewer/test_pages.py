"""Every page over a filled store: it shows what is stored, has a JSON twin, and its links lead to pages."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
import pytest

from reads.advice import Phase, advise_run
from reads.curves import rewards_by_step
from reads.reader_role import grant_reader_role
from reads.run_times import read_run_times
from store.database import Database
from store.schema import Base
from store.token_statistics import record_step_tokens
from tests.integration.viewer.filled_store import SECRET_MARKUP, FilledRun, RunFiller, fill_run


def pages_of(filled: FilledRun) -> list[str]:
    run = f"/runs/{quote(filled.run_id)}"
    rollouts = (filled.solved, filled.unsolved, filled.rejected, filled.failed, filled.running)
    return [
        "/runs",
        "/runs?by_hand=true",
        run,
        f"{run}?axis=hours",
        f"{run}?axis=tokens",
        f"{run}/costs",
        f"{run}/groups",
        f"{run}/groups?state=no_signal&purpose=train",
        f"{run}/tasks",
        f"{run}/versions",
        f"{run}/steering",
        f"{run}/commands",
        f"{run}/commands?step=1&by_line=true",
        f"{run}/steps/1",
        f"/compare?run={quote(filled.run_id)}&axis=tokens",
        f"/rollouts?run={quote(filled.run_id)}",
        f"/rollouts?run={quote(filled.run_id)}&sort=longest",
        f"/rollouts?run={quote(filled.run_id)}&sort=ended",
        f"/rollouts?run={quote(filled.run_id)}&stage=agent%20works",
        f"/groups/{filled.trained_group}",
        f"/groups/{filled.silent_group}",
        f"/groups/{filled.open_group}",
        f"/tasks/{filled.task}",
        f"/search?q=subtracts&run={quote(filled.run_id)}",
        "/search?q=subtracts",
        f"/rollouts/{filled.solved}/tokens",
        f"/rollouts/{filled.solved}/tokens?colour=logprob",
        f"/rollouts/{filled.solved}/tokens?colour=version",
        f"/rollouts/{filled.solved}/tokens?colour=entropy",
        f"/rollouts/{filled.solved}/tokens?colour=ratio",
        f"/rollouts/{filled.solved}/tokens?colour=advantage",
        f"/rollouts/{filled.solved}/attempts/1",
        *(f"/rollouts/{one}" for one in rollouts),
    ]


async def get(client: httpx.AsyncClient, address: str) -> str:
    answer = await client.get(address)
    assert answer.status_code == 200, f"{address}: {answer.status_code}: {answer.text[:300]}"
    return answer.text


async def test_every_page_and_its_json_twin(client: httpx.AsyncClient, filled: FilledRun) -> None:
    for address in pages_of(filled):
        html = await get(client, address)
        assert html.rstrip().endswith("</html>"), address
        path, _, query = address.partition("?")
        twin = await client.get(f"{path}.json?{query}")
        assert twin.headers["content-type"] == "application/json" and isinstance(twin.json(), dict), address
        wished = await client.get(address, headers={"accept": "application/json"})
        assert wished.headers["content-type"] == "application/json", address


@pytest.mark.parametrize("name", ["plain", "a b&outcome=#c?+é%41"])
async def test_every_link_of_every_page_leads_to_a_page(
    client: httpx.AsyncClient, database: Database, model: Path, name: str
) -> None:
    filled = await fill_run(database, name, model)
    run = f"/runs/{quote(name)}"
    targets = set()
    for address in pages_of(filled):
        for target in re.findall(r'(?:href|src)="(/[^"]*)"', await get(client, address)):
            targets.add(unescape(target).partition("#")[0])
    for link in re.findall(r"/runs/[^\"]*/steps/\d+", await get(client, run)):
        targets.add(link)
    missing = {f"{run}/steps/{step}" for step in (2, 3)}  # they have metrics and no plan row here
    for target in sorted(targets - missing):
        answer = await client.get(target, follow_redirects=True)
        assert answer.status_code == 200, f"{target}: {answer.status_code}"
        of_a_run = [one for one in parse_qsl(urlsplit(target).query) if one[0] == "run"]
        assert of_a_run in ([], [("run", name)]), target


async def test_health_needs_no_more_than_the_readers_role_may(client: httpx.AsyncClient, database: Database) -> None:
    assert await grant_reader_role(database)
    assert (await get(client, "/health")) == "ok"
    assert (await get(client, "/runs")).startswith("<!doctype html>")


async def test_what_agents_wrote_is_text(client: httpx.AsyncClient, filled: FilledRun) -> None:
    html = await get(client, f"/rollouts/{filled.solved}")
    assert SECRET_MARKUP not in html and "&lt;script&gt;alert" in html
    assert "script-src" not in (policy := (await client.get("/runs")).headers["content-security-policy"])
    assert policy.startswith("default-src 'self'")


async def test_a_rollout_says_why(client: httpx.AsyncClient, filled: FilledRun) -> None:
    page = (await client.get(f"/rollouts/{filled.solved}.json")).json()
    words = [one["text"] for one in page["why"]]
    assert len(words) == 5
    assert words[0].startswith("Its reward is 1, because the grader pytest (7) judged the patch as solving the task")
    assert words[1] == "1 of 1 tests that must newly pass did; 1 of 1 tests that must still pass did."
    assert "ended by itself after 5 model calls" in words[2] and "changes 1 file" in words[2]
    assert "2 tests failed as they must" in words[3] and "skips a test (calc.py:3)" in words[3]
    assert "advantage in step 1 is +0.5" in words[4]
    failed = (await client.get(f"/rollouts/{filled.failed}.json")).json()["why"][0]["text"]
    assert "SandboxLostError" in failed and "this is not a zero" in failed
    rejected = (await client.get(f"/rollouts/{filled.rejected}.json")).json()["why"]
    assert "rejected the patch by the rule runner_tampered" in rejected[0]["text"]
    assert "has no signal and step 1 left it out" in rejected[-1]["text"]
    assert (
        (await client.get(f"/rollouts/{filled.running}.json"))
        .json()["why"][0]["text"]
        .startswith("It has no reward yet")
    )


async def test_a_conversation_shows_each_tool_for_what_it_is(client: httpx.AsyncClient, filled: FilledRun) -> None:
    page = (await client.get(f"/rollouts/{filled.solved}.json")).json()
    kinds = [use["kind"] for turn in page["turns"] for use in turn["answer"]["tool_uses"]]
    assert kinds == ["shell", "edit"]
    assert page["turns"][1]["messages"][0]["result_of"]["title"] == "cat calc.py"
    assert [turn["kind"] for turn in page["turns"]] == ["main", "main", "sub_agent", "compaction", "main"]
    assert [turn["resends_history"] for turn in page["turns"]] == [False, False, False, False, True]
    assert page["graph"]["num_rows"] == 3, "the sub-agent and the history behind the compaction are branches"
    lanes = {lane["name"] for lane in page["timeline"]["lanes"]}
    assert {"queue", "boot", "agent box", "generate", "generate helper", "tools"} <= lanes


async def test_a_group_marks_the_first_difference_and_missing_signal(
    client: httpx.AsyncClient, filled: FilledRun
) -> None:
    page = (await client.get(f"/groups/{filled.trained_group}.json")).json()
    assert page["has_signal"] is True
    difference = page["members"][1]["difference"]
    assert (difference["number"], difference["what"]) == (1, "answer")
    assert difference["text"][difference["at"] :].startswith(" -n")
    html = await get(client, f"/groups/{filled.silent_group}")
    assert "No signal: all 2 members that count have the reward 0" in html


async def test_a_step_leads_to_the_tokens_with_the_largest_ratios_and_their_commands(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    page = (await client.get(f"/runs/{filled.run_id}/steps/1.json")).json()
    assert {one["rollout"]["id"] for one in page["members"]} == {filled.solved, filled.unsolved}
    assert "has recorded no token" in await get(client, f"/runs/{filled.run_id}/steps/1")
    runs = (await client.get(f"/rollouts/{filled.solved}/tokens.json")).json()["runs"]
    token = next(one for run in runs for one in run["tokens"] if one["trained"])
    recorded = {
        "rollout_id": filled.solved, "turn_id": token["turn_id"], "position": token["position"],
        "token_id": token["id"], "behaviour": -3.0, "logprob": -1.0, "entropy": 0.5, "masked": True,
    }  # fmt: skip
    again = recorded | {"position": token["position"] + 1, "logprob": -2.0}
    gone = recorded | {"rollout_id": 10**12, "turn_id": 10**12, "logprob": -2.5, "masked": False}
    async with database.begin() as connection:
        await record_step_tokens(connection, filled.run_id, 1, [gone])
        await record_step_tokens(connection, filled.run_id, 1, [recorded, again, gone])  # the step is replayed
    assert "Show the 3 tokens" in await get(client, f"/runs/{filled.run_id}/steps/1")
    page = (await client.get(f"/runs/{filled.run_id}/steps/1.json?tokens=true")).json()
    assert len(page["largest_ratios"]) == 2
    first = page["largest_ratios"][0]
    assert first["command"] == "cat calc.py" and len(first["tokens"]) == 2, "equal tokens of equal commands"
    assert [one["ratio"] for one in first["tokens"]] == pytest.approx([7.389, 2.718], abs=1e-3)
    html = await get(client, f"/runs/{filled.run_id}/steps/1?tokens=true")
    link = f"/rollouts/{filled.solved}/tokens?turn={token['turn_id']}&amp;position={token['position']}"
    assert link in html and "none: out of bounds" in html
    tokens = await client.get(link.replace("&amp;", "&"))
    assert tokens.headers["location"].endswith(f"#token-{token['position']}")
    tokens = await client.get(link.replace("&amp;", "&"), follow_redirects=True)
    assert f'id="token-{token["position"]}"' in tokens.text and f"id {token['id']}," in tokens.text
    turn = await client.get(f"/rollouts/{filled.solved}/turns/{token['turn_id']}", follow_redirects=True)
    assert f'id="turn-{token["turn_id"]}"' in turn.text


async def test_tokens_come_page_by_page(client: httpx.AsyncClient, filled: FilledRun) -> None:
    whole = (await client.get(f"/rollouts/{filled.solved}/tokens.json")).json()
    tokens = [token for run in whole["runs"] for token in run["tokens"]]
    assert [token["position"] for token in tokens] == list(range(whole["num_tokens"]))
    assert whole["has_texts"] and whole["advantage"] == 0.5
    assert (whole["training"]["run_id"], whole["training"]["step"]) == (filled.run_id, 1)
    behind = (await client.get(f"/rollouts/{filled.solved}/tokens.json?first=20")).json()
    assert [token for run in behind["runs"] for token in run["tokens"]] == tokens[20:]


async def test_filters_and_pages_of_rollouts(client: httpx.AsyncClient, filled: FilledRun) -> None:
    async def ids(query: str) -> list[int]:
        page = (await client.get(f"/rollouts.json?run={filled.run_id}&{query}")).json()
        return [one["id"] for one in page["rollouts"]]

    every = await ids("")
    assert every == sorted(every, reverse=True) and len(every) == 7
    assert await ids("outcome=open") == [filled.running]
    assert await ids("agent_exit=none&outcome=infra_failed") == [filled.failed]
    assert filled.solved not in await ids("agent_exit=none")
    assert await ids("outcome=rejected") == [filled.rejected]
    assert await ids("reason=sandboxlost") == [filled.failed]
    assert await ids("reason=100%25") == [], "% is a character, not a pattern"
    assert await ids("flagged=true") == [filled.rejected, filled.solved]
    assert await ids("purpose=train&reward_from=0.5&reward_to=") == [filled.solved]
    assert await ids("evaluation=start-greedy") == [every[1]]
    assert await ids(f"before={every[2]}") == every[3:]


async def test_a_list_does_not_begin_with_rollouts_that_have_not_started(
    client: httpx.AsyncClient, filled: FilledRun, database: Database, model: Path
) -> None:
    async with database.begin() as connection:
        waits = await RunFiller(connection, filled.run_id, model).rollout(
            filled.open_group, filled.task, 1, owner=None, claimed_at=None
        )

    async def ids(query: str) -> list[int]:
        return [one["id"] for one in (await client.get(f"/rollouts.json?{query}")).json()["rollouts"]]

    assert waits not in await ids(f"run={filled.run_id}") and waits not in await ids(
        f"run={filled.run_id}&sort=longest"
    )
    html = await get(client, f"/rollouts?run={filled.run_id}")
    (link,) = re.findall(r'href="/rollouts\?([^"]*)">have not started', html)
    assert await ids(unescape(link)) == [waits]
    assert await ids(f"run={filled.run_id}&outcome=open") == [waits, filled.running]


async def test_nothing_of_an_evaluation_is_trained_or_pending(client: httpx.AsyncClient, filled: FilledRun) -> None:
    cells = {
        purpose: re.findall(r'<td class="num">([^<]*)</td>', await get(client, f"/rollouts?purpose={purpose}"))
        for purpose in ("eval", "train")
    }
    assert "30" in cells["train"] and "30" not in cells["eval"], "the number of trained tokens"
    assert "1 evaluation ended" in " ".join(re.sub("<[^>]+>", " ", await get(client, f"/runs/{filled.run_id}")).split())
    assert "1 evaluation ended" in await get(client, f"/runs/{filled.run_id}/groups")


async def test_a_search_finds_what_was_said_and_what_tools_returned(
    client: httpx.AsyncClient, filled: FilledRun
) -> None:
    page = (await client.get(f"/search.json?q=first i READ&run={filled.run_id}")).json()
    assert {hit["rollout_id"] for hit in page["hits"]} == {filled.solved, filled.unsolved}
    assert {hit["said_by"] for hit in page["hits"]} == {"model"} and page["next_page"] is None
    agent = (await client.get(f"/search.json?q=an agent wrote&run={filled.run_id}")).json()
    assert {hit["said_by"] for hit in agent["hits"]} == {"agent"}
    for labels in ("role", "content", "assistant", "tool_calls", "call-1", "function", "after"):
        found = (await client.get(f"/search.json?q={labels}&run={filled.run_id}")).json()
        assert found["hits"] == [], labels
    for said in ("You mend code", "return a - b\n", "calc.py", "Edit"):
        found = (await client.get("/search.json", params={"q": said, "run": filled.run_id})).json()
        assert found["hits"], said
    by_id = await client.get(f"/search?q={filled.failed}")
    assert by_id.headers["location"] == f"/rollouts/{filled.failed}"


async def test_what_a_trained_token_costs(client: httpx.AsyncClient, database: Database, filled: FilledRun) -> None:
    page = (await client.get(f"/runs/{filled.run_id}/costs.json")).json()
    async with database.begin() as connection:
        advice = advise_run(await read_run_times(connection, filled.run_id, 20))
    assert page["advice"]["num_trained_tokens"] == 60 == advice.num_trained_tokens
    assert page["advice"]["box_hours_per_million_trained_tokens"] == pytest.approx(advice.box_hours / 60 * 1e6)
    lanes = {lane["name"]: lane["bars"] for lane in page["lanes"]}
    learner = [(bar["label"], round(bar["seconds"])) for bar in lanes["learner"][1:3]]
    assert learner == [("step 1 waits for the learner to start", 98), ("step 1 is trained", 2)]
    assert max(bar["height"] for bar in lanes["engines"]) == 1
    assert all("tokens sampled a second" in bar["label"] for bar in lanes["engines"])
    assert {bar["kind"] for bar in lanes[str(filled.solved)]} >= {Phase.QUEUE, Phase.BOOT, Phase.SLOWEST}
    html = await get(client, f"/runs/{filled.run_id}/costs")
    assert "the newest 1 of 1 trained step<" in html and (page["steps_wanted"], page["hours"] > 0) == (5, True)
    assert "What changes it" in html and "Where the rollout-hours went" in html
    assert page["phases"].keys() == advice.hours.keys() | advice.causes.keys(), "every part is listed"
    assert all(setting in unescape(html) for setting in page["phases"].values())
    assert f'aria-label="rollout {filled.solved}"' in html and "queue: waits for a worker" in html
    assert (await client.get(f"/runs/{filled.run_id}/costs.json?steps=200")).json()["steps_wanted"] == 200
    assert (await client.get(f"/runs/{filled.run_id}/costs?steps=201")).status_code == 422


async def test_a_step_that_is_planned_anew_has_other_rewards(database: Database, filled: FilledRun) -> None:
    async with database.begin() as connection:
        first = await rewards_by_step(connection, filled.run_id, 1, 3)
        assert [(one.step, one.num_groups, one.num_rollouts, one.mean) for one in first] == [(1, 2, 4, 0.25)]
        await connection.exec_driver_sql("DELETE FROM batch_item")
        assert await rewards_by_step(connection, filled.run_id, 1, 1) == []


async def test_errors_are_sentences(client: httpx.AsyncClient, filled: FilledRun) -> None:
    for address, status, words in (
        ("/rollouts/999999", 404, "rollout 999999 does not exist"),
        ("/runs/none", 404, "run none does not exist"),
        (f"/runs/{filled.run_id}?axis=moons", 422, "axis is one of"),
        ("/rollouts/x", 422, "rollout_id"),
        (f"/rollouts/{2**63}", 422, "too large"),
        (f"/runs/{filled.run_id}/steps/{2**31}", 422, "too large"),
        (f"/rollouts?before={2**63}", 422, "too large"),
        ("/runs/a%00b", 422, "cannot hold"),
        ("/rollouts?reason=%00", 422, "cannot hold"),
        ("/rollouts?sort=oldest", 422, "sort is one of newest, ended, longest, not"),
        ("/rollouts?run=a&stage=sleeps", 422, "stage is one of not started,"),
        ("/rollouts?stage=ends", 422, "stage needs a run"),
        ("/rollouts?reward_from=much", 422, "reward_from is a number, not"),
        (f"/rollouts?step={'9' * 5000}", 422, "step is a number, not"),
        (f"/runs/{filled.run_id}/groups?state=consumed", 422, "state: expected one of open, ready, planned"),
        ("/search?q=a&run=none", 404, "run none does not exist"),
        ("/runs?before=2026-01-01T00:00:00,x", 422, "a time with its zone"),
    ):
        answer = await client.get(address)
        assert answer.status_code == status and words in answer.text, address
        assert answer.headers["content-type"].startswith("text/html")
    for words in ("²", "9" * 30):
        assert (await client.get("/search", params={"q": words})).status_code == 200, words


async def test_looking_changes_nothing(client: httpx.AsyncClient, filled: FilledRun, database: Database) -> None:
    async def newest_rows() -> dict[str, tuple[object, ...]]:
        """Return, by table, the number of rows and the newest transaction that wrote one of them."""
        found = {}
        async with database.begin() as connection:
            for table in Base.metadata.sorted_tables:
                statement = f'SELECT count(*), max(xmin::text::bigint) FROM "{table.name}"'
                found[table.name] = tuple((await connection.exec_driver_sql(statement)).one())
        return found

    before = await newest_rows()
    for address in pages_of(filled):
        await get(client, address)
    assert await newest_rows() == before
