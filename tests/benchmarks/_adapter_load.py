"""A thousand conversations at once through one adapter process: turns per second, added latency, memory, bytes and
transactions.

The adapter is one process with an event loop, so only load shows what its turns cost each other. Postgres, adapter,
engine and clients share the machine's cores; all of them but the engine are real. Added latency: from the request's
first byte to the answer's last, minus the time for which the engine held the call.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from sqlalchemy import func, insert, select, text

from adapter.prompt.renderer import Renderer
from adapter.settings import AdapterSettings
from stack.ports import free_port
from stack.postgres import database_url, ensure_database
from store import sessions
from store.arrays import ids_from_bytes
from store.database import Database
from store.migration import migrate
from store.schema import EngineTable, RolloutTable, RunTable, TaskTable, TurnTable
from tests.benchmarks._adapter_streams import first_texts
from tests.benchmarks._workload import Conversation, model_directory
from tests.standins.bulk_engine import digest_of

Say = Callable[[str], None]
SYSTEM_CHARS = 34_000
"""Gives a first prompt of 12k tokens."""
RESULT_CHARS = 4_500
"""Adds about 1.5k tokens with every turn."""
LONG_TURNS = 104
NUM_LAST = 20
"""Turns of the long conversation, of about 78k to 86k tokens, whose CPU time is compared with other methods."""


@dataclass
class Agent:
    """One session: its token, its conversation, and its calls as (seconds, HTTP status)."""

    session_id: int
    token: str
    talk: Conversation
    calls: list[tuple[float, int]] = field(default_factory=list)

    async def turn(self, port: int) -> float:
        """Make one streamed call over a new connection and continue the conversation with its answer.

        Return its seconds.
        """
        body = self.talk.body(stream=True)
        head = f"POST /v1/messages?beta=true HTTP/1.1\r\nhost: adapter\r\nx-api-key: {self.token}\r\n"
        head += "connection: close\r\n"
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        reply = await reader.read()
        while more := await reader.read():
            reply += more
        seconds = time.monotonic() - started
        writer.close()
        status = int(reply[9:12])
        self.calls.append((seconds, status))
        assert status == 200, reply[:500]
        answer, call_id = _answer(reply)
        self.talk.go_on(answer, call_id)
        return seconds


def _answer(reply: bytes) -> tuple[dict[str, Any], str]:
    """Build the assistant's message from the events, as a client does. Returns it and the id of its tool call."""
    blocks: list[dict[str, Any]] = []
    for line in reply.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = orjson.loads(line[6:])
        assert event["type"] != "error", event
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            else:
                arguments += delta["partial_json"]
        elif event["type"] == "content_block_stop" and arguments:
            blocks[-1]["input"] = orjson.loads(arguments)
    assert event["type"] == "message_stop"
    return {"role": "assistant", "content": blocks}, blocks[-1]["id"]


# ---------------------------------------------------------------- processes


@contextlib.asynccontextmanager
async def bench_process(
    *arguments: str, health: str = "", cwd: Path | None = None
) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=sys.stderr, cwd=cwd)
    try:
        async with asyncio.timeout(900), httpx.AsyncClient(trust_env=False) as http:
            while health:
                assert process.poll() is None, f"{arguments[:2]} ended"
                with contextlib.suppress(httpx.TransportError):
                    await http.get(health)
                    break
                await asyncio.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.asynccontextmanager
async def bench_postgres() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        port = free_port()
        program = (
            "import sys, pathlib; from stack.postgres import run_postgres; "
            "run_postgres(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
        )
        async with bench_process("-c", program, f"{directory}/data", str(port)):
            await ensure_database(port)
            await asyncio.to_thread(migrate, database_url(port))
            yield database_url(port)


@dataclass
class Rig:
    """The parts that a measurement uses."""

    url: str
    database: Database
    adapter_port: int
    engine: str
    renderer: Renderer

    async def get(self, address: str) -> dict[str, Any]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return dict((await http.get(address)).json())

    async def clocks(self) -> dict[str, Any]:
        """The measurements since the last call."""
        return await self.get(f"http://127.0.0.1:{self.adapter_port}/bench")

    async def hold(
        self, least: float, most: float, outputs: list[list[int]] | None = None, token_seconds: float = 0.0
    ) -> None:
        body = {"outputs": outputs or [], "hold_seconds": [least, most], "token_seconds": token_seconds}
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(self.engine + "/texts", json=body)


@contextlib.asynccontextmanager
async def rig(*options: str, checkout: Path | None = None) -> AsyncIterator[Rig]:
    """`options`: of the adapter's process. `checkout`: whose adapter it is; None: this one's."""
    directory = model_directory()
    engine_port = free_port()
    adapter_port = free_port()
    renderer = Renderer(directory)
    async with bench_postgres() as url:
        settings = AdapterSettings(database_url=url, model_path=directory, port=adapter_port, tool_parser="qwen3_coder")
        engine = f"http://127.0.0.1:{engine_port}"
        async with (
            bench_process("-m", "tests.standins.bulk_engine", str(engine_port), health=engine + "/health"),
            bench_process(
                "-m",
                "tests.benchmarks._adapter_process",
                settings.model_dump_json(),
                *options,
                health=f"http://127.0.0.1:{adapter_port}/health",
                cwd=checkout,
            ),
        ):
            database = Database(url)
            try:
                async with database.begin() as conn:
                    row = {"address": engine, "state": "ready", "model_path": ""}
                    await conn.execute(insert(EngineTable).values(**row, heartbeat_at=text("now() + interval '1 day'")))
                found = Rig(url, database, adapter_port, engine, renderer)
                await found.hold(0, 0, _sampled_outputs(renderer))
                yield found
            finally:
                await database.close()


def _sampled_outputs(renderer: Renderer, num_calls: int = 1) -> list[list[int]]:
    talk, end = Conversation(-1, SYSTEM_CHARS, RESULT_CHARS), renderer.tokenizer.plain.token_to_id("<|im_end|>")
    texts = []
    for _ in range(256):
        first, *more = [talk.answer() for _ in range(num_calls)]
        texts.append("\n".join([first.sampled_text(), *(one.sampled_text()[len(one.text) + 1 :] for one in more)]))
    return [[*renderer.tokenizer.plain.encode(one, add_special_tokens=False).ids, end] for one in texts]


async def _agents(database: Database, first: int, number: int, result_chars: int) -> list[Agent]:
    made = []
    limits = {"max_context_tokens": 200_000, "max_response_tokens": 4000, "min_response_tokens": 8, "max_turns": None}
    async with database.begin() as conn:
        if not (await conn.execute(select(RunTable.run_id))).first():
            run = {"config": {}, "config_digest": "", "config_name": "", "seed": 0, "model_path": ""}
            await conn.execute(insert(RunTable).values(run_id="bench", **run))
            task = {"dataset": "d", "dataset_digest": "d", "row_digest": "r", "row_no": 0, "spec": {}}
            await conn.execute(insert(TaskTable).values(**task, label="", image="", workdir="", grader=""))
        task_id = (await conn.execute(select(TaskTable.id))).scalar_one()
        for no in range(first, first + number):
            values = {"run_id": "bench", "task_id": task_id, "member": no, "purpose": "train", "workflow_id": f"w{no}"}
            statement = insert(RolloutTable).values(**values, harness="bench", temperature=1.0)
            rollout_id = (await conn.execute(statement.returning(RolloutTable.id))).scalar_one()
            session_id = await sessions.open_session(conn, rollout_id, 1, 1.0, "policy", limits)
            talk = Conversation(no, SYSTEM_CHARS, result_chars)
            made.append(Agent(session_id, await sessions.add_token(conn, session_id), talk))
    return made


# ---------------------------------------------------------------- what is measured


async def _saturate(found: Rig, agents: list[Agent], num_turns: int, at_once: int) -> float:
    """Let every agent make `num_turns` turns, `at_once` calls at a time. Return turns per second."""
    gate = asyncio.Semaphore(at_once)

    async def turn(agent: Agent) -> None:
        async with gate:
            await agent.turn(found.adapter_port)

    started = time.monotonic()
    for _ in range(num_turns):
        await asyncio.gather(*(turn(agent) for agent in agents))
    return num_turns * len(agents) / (time.monotonic() - started)


async def _arrive(found: Rig, agents: list[Agent], per_second: float, seconds: float) -> tuple[float, int]:
    """Start turns of random agents at random times, also while earlier ones run.

    Return turns per second, most at once.
    """
    rng, running, most, idle = random.Random(1), set[asyncio.Task[float]](), 0, list(agents)
    started, due, num = time.monotonic(), 0.0, 0

    def ended(task: "asyncio.Task[float]", agent: Agent) -> None:
        running.discard(task)
        idle.append(agent)
        task.result()

    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - time.monotonic()))
        idle[at], idle[-1] = idle[-1], idle[at := rng.randrange(len(idle))]
        agent = idle.pop()
        task = asyncio.create_task(agent.turn(found.adapter_port))
        running.add(task)
        task.add_done_callback(lambda one, agent=agent: ended(one, agent))  # type: ignore[misc]
        most, num = max(most, len(running)), num + 1
        due += rng.expovariate(per_second)
    await asyncio.gather(*running)
    return num / (time.monotonic() - started), most


async def _rows(found: Rig) -> dict[int, list[Any]]:
    """All rows by session, after the newest deliveries were recorded."""
    async with asyncio.timeout(30):
        undelivered = "SELECT count(*) FROM turn WHERE state = 'completed' AND NOT delivered"
        while True:
            async with found.database.begin() as conn:
                if not (await conn.exec_driver_sql(undelivered)).scalar_one():
                    break
            await asyncio.sleep(0.05)
    columns = (
        TurnTable.id,
        TurnTable.session_id,
        TurnTable.parent_turn_id,
        TurnTable.kept_tokens,
        TurnTable.suffix_ids,
        TurnTable.sampled_ids,
        TurnTable.state,
        TurnTable.delivered,
        TurnTable.prompt_tokens,
    )
    rows: dict[int, list[Any]] = {}
    async with found.database.begin() as conn:
        for row in await conn.execute(select(*columns).order_by(TurnTable.id)):
            rows.setdefault(row.session_id, []).append(row)
    return rows


def _compare_rows(rows: dict[int, list[Any]], agents: list[Agent], seen: dict[str, Any]) -> dict[str, Any]:
    """Compare the rows with what the engine saw, each prompt and each answer by its digest, and count them."""
    calls: dict[str, Any] = seen["calls"]
    num_answers = sum(len(agent.calls) for agent in agents)
    num_rows = sum(len(rows[agent.session_id]) for agent in agents)
    num_wrong = 0
    for agent in agents:
        streams: dict[int, Any] = {}
        for row in rows[agent.session_id]:
            kept = streams[row.parent_turn_id][: row.kept_tokens] if row.parent_turn_id else np.zeros(0, np.int32)
            prompt, sampled = np.concatenate([kept, ids_from_bytes(row.suffix_ids)]), ids_from_bytes(row.sampled_ids)
            streams[row.id] = np.concatenate([prompt, sampled])
            said = calls.get(f"turn-{row.id}", ("", "", 0.0))
            right = said[:2] == [digest_of(prompt), digest_of(sampled)] and row.state == "completed" and row.delivered
            num_wrong += not right
    assert num_rows == num_answers and not num_wrong, (num_rows, num_answers, num_wrong)
    # No call was sent to the engine twice.
    assert sum(map(len, rows.values())) == len(calls) == seen["num_calls"], (len(calls), seen["num_calls"])
    return {"answers": num_answers, "rows": num_rows, "rows_that_differ": num_wrong, "calls_without_a_row": 0}


def _added(
    rows: dict[int, list[Any]], agents: list[Agent], first_calls: dict[int, int], seen: dict[str, Any]
) -> dict[str, float]:
    added = []
    for agent in agents:
        for row, (seconds, _) in list(zip(rows[agent.session_id], agent.calls, strict=True))[
            first_calls[agent.session_id] :
        ]:
            added.append(1e3 * (seconds - seen["calls"][f"turn-{row.id}"][2]))
    return {f"p{one}": round(float(np.percentile(added, one)), 1) for one in (50, 95, 99)}


async def _store_costs(found: Rig, num_turns: int, before: tuple[int, int]) -> dict[str, Any]:
    wal, commits = await _store_counters(found)
    async with found.database.begin() as conn:
        sizes = (
            await conn.exec_driver_sql("SELECT avg(pg_column_size(turn.*)), pg_total_relation_size('turn') FROM turn")
        ).one()
    return {
        "rows_per_turn": 1,
        "transactions_per_turn": round((commits - before[1]) / num_turns, 2),
        "row_bytes": round(float(sizes[0])),
        "bytes_on_disk_per_turn": round(int(sizes[1]) / num_turns),
        "wal_bytes_per_turn": round((wal - before[0]) / num_turns),
    }


async def _store_counters(found: Rig) -> tuple[int, int]:
    """Bytes of WAL and number of commits since the server was started."""
    query = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint, xact_commit"
        " FROM pg_stat_database WHERE datname = current_database()"
    )
    async with found.database.begin() as conn:
        row = (await conn.exec_driver_sql(query)).one()
    return int(row[0]), int(row[1])


async def _load(found: Rig, num_sessions: int, seconds: float, say: Say) -> dict[str, Any]:
    agents = await _agents(found.database, 2, num_sessions, RESULT_CHARS)
    before, counters = await found.clocks(), await _store_counters(found)
    say(f"load: {num_sessions} sessions grow to 20k tokens, 32 calls at once")
    rate = await _saturate(found, agents, 6, 32)
    full, store = await found.clocks(), await _store_costs(found, 6 * num_sessions, counters)
    num_full = {agent.session_id: len(agent.calls) for agent in agents}
    say(f"load: {rate:.0f} turns/s; random arrivals at half of that for {seconds:.0f} s")
    await found.hold(0.2, 1.0)
    arrived, most = await _arrive(found, agents, rate / 2, seconds)
    num_arrived = sum(len(agent.calls) for agent in agents) - 6 * num_sessions
    calm, seen, rows = await found.clocks(), await found.get(found.engine + "/calls"), await _rows(found)
    tokens = [
        sum(
            len(ids_from_bytes(one.suffix_ids)) + len(ids_from_bytes(one.sampled_ids))
            for one in rows[agent.session_id][:6]
        )
        for agent in agents
    ]
    return {
        "sessions": num_sessions,
        "tokens_per_session": round(float(np.median(tokens))),
        "saturated": {"calls_at_once": 32, "turns_per_second": round(rate, 1), **_work(before, full, 6 * num_sessions)},
        "random_arrivals": {
            "turns_per_second": round(arrived, 1),
            "most_calls_at_once": most,
            "added_ms": _added(rows, agents, num_full, seen),
            **_work(full, calm, num_arrived),
        },
        "resident_bytes_per_session": round((full["resident_bytes"] - before["resident_bytes"]) / num_sessions),
        "kept": _compare_rows(rows, agents, seen),
        "store": store,
    }


def _work(before: dict[str, Any], after: dict[str, Any], num_turns: int) -> dict[str, Any]:
    return {
        "adapter_cpu_ms_per_turn": round(1e3 * (after["cpu_seconds"] - before["cpu_seconds"]) / num_turns, 2),
        "transactions": after["transactions"],
        "transaction_ms": round(1e3 * after["transaction_seconds"] / max(after["transactions"], 1), 2),
    }


def _loop(clocks: dict[str, Any]) -> dict[str, Any]:
    return {
        "callbacks": clocks["callbacks"],
        "longest_on_loop_cpu_ms": round(clocks["longest_callback_ms"], 1),
        "longest_on_loop_in": clocks["longest_callback_in"],
        "callbacks_above_10_cpu_ms": clocks["callbacks_above_10_ms"],
        "longest_on_loop_wall_ms": round(clocks["longest_callback_wall_ms"], 1),
        "callbacks_above_10_wall_ms": clocks["callbacks_above_10_ms_wall"],
        "longest_collection_ms": round(clocks["longest_collection_ms"], 1),
        "longest_collection_generation": clocks["longest_collection_generation"],
        "collections_above_10_ms": clocks["collections_above_10_ms"],
    }


async def _long(found: Rig, say: Say) -> dict[str, Any]:
    """One agent alone, 104 turns to 86k tokens: the size of its rows compared with its final stream.

    The CPU time of the last turns is compared with other methods.
    """
    (agent,) = await _agents(found.database, 0, 1, 2_350)
    await agent.turn(found.adapter_port)
    before = await found.clocks()
    say(f"one long conversation: {LONG_TURNS} turns")
    for _ in range(LONG_TURNS - NUM_LAST - 1):
        await agent.turn(found.adapter_port)
    clocks = await found.clocks()
    counters = await _store_counters(found)
    for _ in range(NUM_LAST):
        await agent.turn(found.adapter_port)
    last = await found.clocks()
    store = await _store_costs(found, NUM_LAST, counters)
    seen, rows = await found.get(found.engine + "/calls"), await _rows(found)
    async with found.database.begin() as conn:
        columns = ("suffix_ids", "sampled_ids", "logprobs", "request", "answer")
        sums = ", ".join(f"sum(pg_column_size({name}))" for name in ("turn.*", *columns))
        sizes = (await conn.exec_driver_sql(f"SELECT {sums} FROM turn WHERE session_id = {agent.session_id}")).one()
    tokens = sum(
        len(ids_from_bytes(one.suffix_ids)) + len(ids_from_bytes(one.sampled_ids)) for one in rows[agent.session_id]
    )
    return {
        "turns": _compare_rows(rows, [agent], seen)["rows"],
        "final_stream_tokens": tokens,
        "final_stream_bytes": 4 * tokens,
        "row_bytes": int(sizes[0]),
        "row_bytes_over_stream": round(int(sizes[0]) / (4 * tokens), 2),
        "column_bytes": {name: int(size) for name, size in zip(columns, sizes[1:], strict=True)},
        "added_ms": _added(rows, [agent], {agent.session_id: 1}, seen),
        **_work(before, clocks, LONG_TURNS - NUM_LAST - 1),
        "last_turns": {
            "turns": NUM_LAST,
            "prompt_tokens": rows[agent.session_id][-NUM_LAST // 2].prompt_tokens,
            **_work(clocks, last, NUM_LAST),
            "transactions_per_turn": store["transactions_per_turn"],
        },
    }


async def _deep_agents(found: Rig, number: int, num_answers: int, result_chars: int) -> list[Agent]:
    """Agents whose histories have answers already, after their first turns, which read the whole histories."""
    async with found.database.begin() as conn:
        first = 2_000_000 + int((await conn.execute(select(func.count(RolloutTable.id)))).scalar_one())
    agents = await _agents(found.database, first, number, result_chars)
    for talk in (agent.talk for agent in agents):
        for _ in range(num_answers):
            answer = talk.answer()
            talk.go_on(answer.wire(), answer.call_id)
    await _saturate(found, agents, 1, number)
    return agents


async def _deep(found: Rig, say: Say) -> dict[str, Any]:
    """64 agents with histories of about 80k tokens, all calls at once."""
    say("64 deep sessions")
    agents = await _deep_agents(found, 64, 45, RESULT_CHARS)
    before = await found.clocks()
    rate = await _saturate(found, agents, 4, 64)
    work = _work(before, await found.clocks(), 4 * 64)
    return {
        "prompt_tokens": (await _rows(found))[agents[0].session_id][-1].prompt_tokens,
        "turns_per_second": round(rate, 1),
        "turns_per_cpu_second": round(1e3 / work["adapter_cpu_ms_per_turn"], 1),
        **work,
    }


async def compare(checkout: Path, num_rounds: int, say: Say) -> dict[str, Any]:
    """Compare turns of about 79k tokens in the adapters of this checkout and of another one, in turn."""
    kinds = {"one_session": (1, 75, 40, 2_350), "64_sessions": (64, 51, 4, RESULT_CHARS)}
    ms: dict[str, dict[str, list[float]]] = {kind: {"ours": [], "theirs": []} for kind in kinds}
    tokens = {}
    async with rig() as ours, rig(checkout=checkout) as theirs:
        rigs = {"ours": ours, "theirs": theirs}
        for one in rigs.values():
            await _warm_up(one, say)
        for number, (kind, (num_agents, num_answers, num_turns, chars)) in product(range(num_rounds), kinds.items()):
            say(f"round {number + 1} of {num_rounds}: {kind}")
            agents = {name: await _deep_agents(one, num_agents, num_answers, chars) for name, one in rigs.items()}
            before = {name: await one.clocks() for name, one in rigs.items()}
            for _, (name, one) in product(range(num_turns), rigs.items()):
                await _saturate(one, agents[name], 1, num_agents)
            for name, one in rigs.items():
                work = _work(before[name], await one.clocks(), num_turns * num_agents)
                ms[kind][name].append(work["adapter_cpu_ms_per_turn"])
            tokens[kind] = (await _rows(ours))[agents["ours"][0].session_id][num_turns // 2].prompt_tokens
    return {
        kind: {
            "prompt_tokens": tokens[kind],
            "cpu_ms_per_turn": {name: round(float(np.median(one)), 2) for name, one in found.items()},
            "ours_over_theirs": round(float(np.median(np.divide(found["ours"], found["theirs"]))), 3),
            "each": found,
        }
        for kind, found in ms.items()
    }


async def _event_loop(found: Rig, say: Say) -> dict[str, Any]:
    """Measure for how long callbacks block asyncio's event loop while a hundred sessions make calls, 32 at once."""
    say("the event loop's callbacks")
    agents = await _agents(found.database, 2, 100, RESULT_CHARS)
    await found.clocks()
    await _saturate(found, agents, 6, 32)
    return _loop(await found.clocks())


async def _measure(num_sessions: int, seconds: float, say: Say) -> dict[str, Any]:
    async with rig() as found:
        await _warm_up(found, say)
        (reader,) = await _agents(found.database, 1_000_000, 1, RESULT_CHARS)
        await found.hold(0, 0, _sampled_outputs(found.renderer, num_calls=2))
        streaming = await first_texts(found, reader)
        await found.hold(0, 0, _sampled_outputs(found.renderer))
        measured = {
            "streaming": streaming,
            "one_long_conversation": await _long(found, say),
            "deep_sessions": await _deep(found, say),
            "load": await _load(found, num_sessions, seconds, say),
        }
    async with rig("--clocked") as found:
        await _warm_up(found, say)
        return measured | {"event_loop": await _event_loop(found, say)}


async def measure_turns(num_agents: int, num_turns: int, result_chars: int, say: Say) -> float:
    """Return the CPU milliseconds of a new adapter per turn of `num_agents` conversations, one call at a time."""
    async with rig() as found:
        await _warm_up(found, say)
        agents = await _agents(found.database, 2, num_agents, result_chars)
        await _saturate(found, agents, 1, 1)
        before = await found.clocks()
        await _saturate(found, agents, num_turns, 1)
        await asyncio.sleep(6)  # the last spans are exported by then
        after = await found.clocks()
        return float(_work(before, after, num_turns * num_agents)["adapter_cpu_ms_per_turn"])


async def _warm_up(found: Rig, say: Say) -> None:
    say("warming up (the output parsers take a while to import)")
    await _saturate(found, await _agents(found.database, 1, 1, RESULT_CHARS), 2, 1)


def measure(num_sessions: int, seconds: float, say: Say) -> dict[str, Any]:
    return asyncio.run(_measure(num_sessions, seconds, say))
