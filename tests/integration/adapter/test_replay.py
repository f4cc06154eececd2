"""A further attempt gets the answers of the one before: each turn stays one row, and none is sampled again."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert, update

from adapter.turns.loss_mask import build_chains
from store import sessions, turns
from store.arrays import ids_from_bytes, pack_json, unpack_json
from store.schema import PatchTable, TurnTable
from tests.integration.adapter.conftest import LIMITS, Opened, ScriptedEngine, adapter_here, adapter_settings
from tests.integration.adapter.test_dialects import CALL, CHAT_TOOLS
from tests.integration.adapter.test_durability import ask
from tests.integration.adapter.test_sampling import post

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "fix it"}]
LISTED = ["-rw-r--r-- 1 agent agent 12 Nov 29 10:00 calc.py", "1 passed in 0.03s", "[main 1a2b3c4] Mend it\n done"]
LISTED_LATER = [
    "-rw-r--r-- 1 agent agent 12 Nov 29 11:59 calc.py",
    "1 passed in 1.20s",
    "[main 99dd3c4] Mend it\n done",
]


async def next_attempt(opened: Opened, attempt: int, closes: bool = True) -> Opened:
    """Begin an attempt as the stage `boot` does."""
    async with opened.database.begin() as conn:
        if closes:
            await sessions.close_session(conn, opened.rollout_id, attempt - 1)
        session_id = await sessions.open_session(conn, opened.rollout_id, attempt, 0.7, "policy", LIMITS)  # type: ignore[arg-type]
        token = await sessions.add_token(conn, session_id)
    return Opened(opened.rollout_id, session_id, token, opened.database)


async def converse(address: str, opened: Opened, results: list[str], lane: str = "", later: str = "") -> list[str]:
    """Ask once, and once more after each result; return the answers. `later`: the adapter after the first call."""
    messages, answers = list(QUESTION), list[str]()
    headers = {"x-claude-code-agent-id": lane} if lane else {}
    for result in [*results, None]:
        reply = await ask(later if answers and later else address, opened.token, headers, messages)
        message = reply.json()["choices"][0]["message"]
        answers.append(message["content"])
        messages += [message, {"role": "user", "content": result}]
    return answers


async def num_calls(engine: ScriptedEngine) -> int:
    return len((await engine.seen())["calls"])


async def test_the_same_requests_get_the_same_turns(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "edit", "test", "done")
    first = await converse(adapter, opened, LISTED)
    recorded = await opened.wait_delivered(4)
    again = await next_attempt(opened, 2)
    assert await converse(adapter, again, LISTED) == first
    replayed = await again.wait_delivered(4)
    assert [row.id for row in replayed] == [row.id for row in recorded] and not await opened.turns()
    assert [row.sampled_ids for row in replayed] == [row.sampled_ids for row in recorded]
    assert all(row.replayed_at is not None and row.attempt == 2 for row in replayed)
    assert await num_calls(engine) == 4
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, opened.rollout_id, 2))
    assert chain.num_trained == sum(row.num_sampled for row in recorded)


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_is_volatile_is_shown_as_it_was(
    adapter: str, engine: ScriptedEngine, opened: Opened, postgres_url: str, model_dir: Path, restarts: bool
) -> None:
    """The context of what is sampled behind a replay is the recorded one, also for another adapter."""
    await engine.say("look", "edit", "test", "live")
    await converse(adapter, opened, LISTED[:2])
    recorded = await opened.wait_delivered(3)
    again = await next_attempt(opened, 2)
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as other:
        found = await converse(adapter, again, LISTED_LATER, later=other if restarts else "")
    assert found == ["look", "edit", "test", "live"]
    rows = await again.wait_delivered(4)
    assert [row.id for row in rows[:3]] == [row.id for row in recorded]
    calls = (await engine.seen())["calls"]
    stream = [*ids_from_bytes(recorded[-1].suffix_ids).tolist(), *ids_from_bytes(recorded[-1].sampled_ids).tolist()]
    assert len(calls) == 4 and rows[3].parent_turn_id == recorded[-1].id and rows[3].replayed_at is None
    at = recorded[-1].kept_tokens
    assert calls[3]["ids"][at : at + len(stream)] == stream
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, opened.rollout_id, 2))
    assert chain.num_trained == sum(row.num_sampled for row in rows)


@pytest.mark.parametrize(
    ("days", "answers"), [((3, 2, 4), ["one", "two", "sampled anew"]), ((3, 4), ["one", "sampled anew"])]
)
async def test_a_question_that_names_the_date_is_replayed_after_midnight(
    adapter: str, engine: ScriptedEngine, opened: Opened, days: tuple[int, ...], answers: list[str]
) -> None:
    """Programs write the date into their first messages. A later question, such as a sub-agent's, may mean its date."""

    def question(day: int) -> list[dict[str, Any]]:
        system = {"role": "system", "content": f"Today's date is 2026-12-{day:02}."}
        return [system, {"role": "user", "content": f"fix it, since 2026-12-{day:02}"}]

    await engine.say("one", "two", "sampled anew")
    for day in (1, 2):
        await ask(adapter, opened.token, messages=question(day))
    again = await next_attempt(opened, 2)
    found = []
    for day in days:
        reply = await ask(adapter, again.token, messages=question(day))
        found.append(reply.json()["choices"][0]["message"]["content"])
    assert found == answers and await num_calls(engine) == 3


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
@pytest.mark.parametrize(("lost", "present"), [(4711, 523), (7, 9)])
async def test_an_answer_that_names_a_process_of_the_lost_box_ends_the_replay(
    thinking: str, engine: ScriptedEngine, opened: Opened, lost: int, present: int
) -> None:
    """Its result would be read as before, while the process of the new box, which has another id, goes on. An answer
    that has the same number for something else is replayed. That the result is an id, its command says.
    """

    async def converse_with(opened: Opened, pid: int) -> list[str]:
        messages: list[dict[str, Any]] = list(QUESTION)
        commands = []
        for result in (f"started {pid}", "1 passed in 0.03s", "done"):
            reply = await post(thinking, opened, "/v1/chat/completions", {"messages": messages, "tools": CHAT_TOOLS})
            message = reply.json()["choices"][0]["message"]
            (called,) = message["tool_calls"]
            commands.append(called["function"]["arguments"])
            messages += [message, {"role": "tool", "tool_call_id": called["id"], "content": result}]
        return commands

    def call(command: str) -> str:
        return CALL.replace("ls -a", command)

    await engine.say(
        call("python -m http.server & echo started $!"),
        call("head -7 a"),
        call(f"kill {lost}"),
        call(f"kill {present}"),
    )
    first = await converse_with(opened, lost)
    assert f"kill {lost}" in first[2]
    again = await next_attempt(opened, 2)
    found = await converse_with(again, present)
    assert found[:2] == first[:2] and f"kill {present}" in found[2] and await num_calls(engine) == 4


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
@pytest.mark.parametrize(
    ("started", "ended", "ids"),
    [
        (
            "Command running in background with ID: {}. It works.",
            "<task-id>{}</task-id> completed",
            ("baejjo4or", "bp4i301dr", "bq5jj07ab"),
        ),
        ("id: {}\npid: 292", "{} completed", ("bg_0c210b66", "bg_1d47e190", "bg_20c3f4a1")),
    ],
)
async def test_the_answer_before_a_message_that_came_by_itself_takes_its_time(
    thinking: str, engine: ScriptedEngine, opened: Opened, started: str, ended: str, ids: tuple[str, str, str]
) -> None:
    """A program in the background ends by the clock, while the answers of a replay take no time."""

    async def converse_with(opened: Opened, process: str) -> tuple[list[str], float]:
        """Return the commands, and the seconds from the request that names the program to the answer before its end."""
        messages: list[dict[str, Any]] = list(QUESTION)
        results = [started.format(process), "1 passed", "2 passed", "3 passed"]
        found, times = list[str](), list[float]()
        for result in results:
            times.append(time.monotonic())
            reply = await post(thinking, opened, "/v1/chat/completions", {"messages": messages, "tools": CHAT_TOOLS})
            message = reply.json()["choices"][0]["message"]
            times.append(time.monotonic())
            (called,) = message["tool_calls"]
            found.append(called["function"]["arguments"])
            messages += [message, {"role": "tool", "tool_call_id": called["id"], "content": result}]
            if result == "1 passed":
                messages.append({"role": "user", "content": ended.format(process)})
        return found, times[3] - times[2]

    async def sample() -> None:
        for number in range(5):
            await engine.wait_for_calls(number + 1)
            await asyncio.sleep(0.5)
            await engine.release(str(number))

    sampled = [engine.ids(CALL.replace("ls -a", f"step {number}")) for number in range(5)]
    await engine.script(*({"ids": one, "hold": str(number)} for number, one in enumerate(sampled)))
    sampling = asyncio.create_task(sample())
    first, _ = await converse_with(opened, ids[0])
    rows = await opened.wait_delivered(4)
    recorded = (rows[1].completed_at - rows[1].created_at).total_seconds()
    again = await next_attempt(opened, 2)
    found, seconds = await converse_with(again, ids[1])
    assert found == first and seconds >= recorded >= 0.5 and await num_calls(engine) == 4
    third = await next_attempt(opened, 3)  # two boxes have ended behind the last turn
    found, seconds = await converse_with(third, ids[2])
    assert found[:3] == first[:3] and seconds >= recorded and await num_calls(engine) == 5
    await sampling


async def test_another_result_ends_the_replay(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "edit", "test", "edit otherwise", "look again")
    await converse(adapter, opened, LISTED[:2])
    again = await next_attempt(opened, 2)
    found = await converse(adapter, again, ["-rw-r--r-- 1 agent agent 99 Nov 29 11:59 calc.py", *LISTED[1:2]])
    assert found == ["look", "edit otherwise", "look again"]
    assert [row.replayed_at is None for row in await again.turns()] == [False, True, True]
    assert [row.attempt for row in await opened.turns()] == [1, 1]


@pytest.mark.parametrize("order", [("", "helper"), ("helper", "")])
async def test_a_sub_agent_is_replayed_in_its_lane(
    adapter: str, engine: ScriptedEngine, opened: Opened, postgres_url: str, model_dir: Path, order: tuple[str, str]
) -> None:
    """The tokens of both begin as the template does, so the second hangs on the first, and is not replayed without."""
    await engine.say("main", "helper", "another")
    first = {lane: await converse(adapter, opened, [], lane) for lane in ("", "helper")}
    again = await next_attempt(opened, 2)
    found = {lane: await converse(adapter, again, [], lane) for lane in order}
    is_same_order = order[0] == ""
    assert found == (first if is_same_order else {"helper": ["another"], "": ["main"]})
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as other:
        assert (await ask(other, again.token, {}, [{"role": "user", "content": "and now"}])).status_code == 200
    async with opened.database.begin() as conn:
        chains = build_chains(await turns.load_metas(conn, opened.rollout_id, 2))
    assert sum(chain.num_trained for chain in chains) > 0


async def test_a_turn_stays_where_its_tokens_begin(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """A title that is sampled anew in the third attempt leaves the main call behind it, whose tokens begin with it."""
    title = [{"role": "user", "content": "Generate a short title for this"}]
    await engine.say("a title", "look", "edit", "another title", "look again", "edit again")
    await ask(adapter, opened.token, messages=title)
    await converse(adapter, opened, LISTED[:1])
    second = await next_attempt(opened, 2)
    await ask(adapter, second.token, messages=title)
    assert await converse(adapter, second, LISTED[:1]) == ["look", "edit"]
    third = await next_attempt(opened, 3)
    await ask(adapter, third.token, messages=title)
    assert await converse(adapter, third, LISTED[:1]) == ["look again", "edit again"]
    await third.wait_delivered(3)
    async with opened.database.begin() as conn:
        build_chains(await turns.load_metas(conn, opened.rollout_id, 3))


async def test_an_attempt_with_a_patch_keeps_its_turns(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "sampled anew")
    await converse(adapter, opened, [])
    async with opened.database.begin() as conn:
        patch = {"rollout_id": opened.rollout_id, "attempt": 1, "base_commit": "", "diff": b"", "num_bytes": 0}
        await conn.execute(insert(PatchTable).values(patch | {"num_files": 0}))
    again = await next_attempt(opened, 2)
    assert await converse(adapter, again, []) == ["sampled anew"] and len(await opened.turns()) == 1


async def test_a_key_of_the_call_and_another_limit(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """A program that makes a key for each call is replayed; a request that the sample does not fit is not."""
    await engine.say("one two three", "one")
    await ask(adapter, opened.token, {"Idempotency-Key": "first"}, QUESTION)
    again = await next_attempt(opened, 2)
    reply = await ask(adapter, again.token, {"Idempotency-Key": "second"}, QUESTION)
    assert reply.json()["choices"][0]["message"]["content"] == "one two three" and await num_calls(engine) == 1
    third = await next_attempt(opened, 3)
    async with httpx.AsyncClient(base_url=adapter, headers={"x-api-key": third.token}, timeout=300) as http:
        reply = await http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 2})
    assert await num_calls(engine) == 2 and [row.attempt for row in await again.turns()] == [2]


async def test_an_attempt_that_goes_on_is_not_taken_from(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "sampled anew")
    await converse(adapter, opened, [])
    again = await next_attempt(opened, 2, closes=False)
    assert await converse(adapter, again, []) == ["sampled anew"]
    assert len(await opened.turns()) == len(await again.turns()) == 1


async def test_what_two_attempts_ended_behind_is_sampled_anew(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("look", "fill the memory", "be careful")
    await converse(adapter, opened, LISTED[:1])
    second = await next_attempt(opened, 2)
    assert await converse(adapter, second, LISTED[:1]) == ["look", "fill the memory"]
    third = await next_attempt(opened, 3)
    assert await converse(adapter, third, LISTED[:1]) == ["look", "be careful"]
    rows = await third.wait_delivered(2)
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, opened.rollout_id, 3))
    assert chain.num_trained == sum(row.num_sampled for row in rows)


WORDS = ["ok", "12", "calc.py", "error: 3", "0.5", "1a2b3c4", "x = 1"]


def some_result(rng: random.Random, changes: bool) -> tuple[str, str]:
    """Return a result and what the same command writes later; `changes`: more than volatile parts differ."""
    lines = [rng.choice(WORDS) for _ in range(rng.randint(1, 4))]
    later = list(lines)
    for at in range(len(lines)):
        if rng.random() < 0.5:
            seconds = rng.sample(range(60), 2)
            lines[at] += f" at 10:00:{seconds[0]:02} in {seconds[0]}.5s"
            later[at] += f" at 10:01:{seconds[1]:02} in {seconds[1]}.5s"
    if changes:
        at = rng.randrange(len(later))
        later[at] = rng.choice([one for one in WORDS if not later[at].startswith(one)])
    return "\n".join(lines), "\n".join(later)


@pytest.mark.parametrize("seed", range(6))
async def test_any_history(adapter: str, engine: ScriptedEngine, opened: Opened, seed: int) -> None:
    """No sample has another context than the one that the engine saw, for any results of the second attempt."""
    rng = random.Random(seed)
    length = rng.randint(2, 5)
    diverges_at = rng.randint(0, length)
    pairs = [some_result(rng, at == diverges_at) for at in range(length)]
    await engine.say(*(f"answer {number}" for number in range(2 * length + 2)))
    await converse(adapter, opened, [before for before, _ in pairs])
    await opened.wait_delivered(length + 1)
    again = await next_attempt(opened, 2)
    await converse(adapter, again, [later for _, later in pairs])
    rows = await again.wait_delivered(length + 1)
    num_replayed = sum(row.replayed_at is not None for row in rows)
    assert num_replayed == min(diverges_at, length) + 1
    calls = (await engine.seen())["calls"]
    assert len(calls) == length + 1 + len(rows) - num_replayed
    prompts = {tuple(call["ids"]) for call in calls}
    streams: dict[int, list[int]] = {}
    for row in rows:
        parent = streams[row.parent_turn_id][: row.kept_tokens] if row.parent_turn_id is not None else []
        prompt = parent + ids_from_bytes(row.suffix_ids).tolist()
        assert tuple(prompt) in prompts
        streams[row.id] = prompt + ids_from_bytes(row.sampled_ids).tolist()


async def test_an_answer_without_its_options_is_replayed(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """Earlier versions stored none; they count as equal, as in a retry."""
    await engine.say("look")
    await converse(adapter, opened, [])
    (row,) = await opened.wait_delivered(1)
    answer: Any = unpack_json(row.answer)
    async with opened.database.begin() as conn:
        values = {"answer": pack_json(answer | {"asked": None})}
        await conn.execute(update(TurnTable).where(TurnTable.id == row.id).values(values))
    again = await next_attempt(opened, 2)
    assert await converse(adapter, again, []) == ["look"] and await num_calls(engine) == 1
