"""A rollout through all its processes is one trace; log lines have its ids; a lost collector costs only spans."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from ratchet.tracing import RolloutTrace
from store.schema import InstallationTable, TurnTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, call, finish
from tests.standins.collector import CollectedSpan

pytestmark = pytest.mark.timeout(600)


def json_lines(loop: Loop, part: str) -> Iterator[dict[str, Any]]:
    for line in loop.log(part).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a process that another test has killed may leave half a line
            yield json.loads(line)


async def trace_of(loop: Loop, rollout_id: int) -> RolloutTrace:
    async with loop.database.begin() as connection:
        installation = (await connection.execute(select(InstallationTable.uuid))).scalar_one()
    return RolloutTrace.of(installation, rollout_id)


async def spans_of(loop: Loop, rollout_id: int, *names: str) -> dict[str, list[CollectedSpan]]:
    """Return the rollout's spans by name, once those of `names` have arrived."""
    trace = await trace_of(loop, rollout_id)
    found: dict[str, list[CollectedSpan]] = {}

    async def are_there() -> bool:
        found.clear()
        for one in sorted(loop.collector.spans, key=lambda span: span.began):
            if one.trace == trace.hex:
                found.setdefault(one.name, []).append(one)
        return all(name in found for name in names)

    await loop.until(are_there, f"the spans {names} have arrived", 60)
    return found


async def test_one_rollout_is_one_trace(loop: Loop) -> None:
    await loop.script("lost", status=500)
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**TASK))
    _, row = await finish(loop, handle)
    found = await spans_of(loop, row.id, "finalise", "rollout", "turn")
    spans = [one for same in found.values() for one in same]
    rollout, attempt = found["rollout"][0], found["attempt"][-1]
    assert (rollout.parent, attempt.parent) == ("", rollout.id)
    assert rollout.attributes["ratchet.workflow_id"] == handle.id
    assert rollout.attributes["ratchet.outcome"] == "graded" and rollout.attributes["ratchet.reward"] == 1.0
    assert all(rollout.began <= one.began <= one.ended for one in spans if one.name != "boot")

    parents = {one.id: one.name for one in spans}
    tree = {(one.name, parents[one.parent]) for one in spans if one.parent}  # a busy machine may retry a stage
    boots = {("boot", "attempt"), ("boot", "rollout")}
    stages = {("agent", "attempt"), ("claim", "rollout"), ("diff", "attempt"), ("finalise", "rollout")}
    calls = {("engine request", "turn"), ("turn", "attempt"), ("attempt", "rollout")}
    rest = {("grade", "rollout"), ("tests", "grade"), ("workspace", "attempt")}
    assert tree - {("release", "rollout")} == boots | stages | calls | rest
    check_facts(found, row.run_id)
    await check_engine(loop, found["engine request"])
    await check_turns(loop, found["turn"], row.id)
    assert [one.error is None for one in found["engine request"][:2]] == [False, True]
    [lost] = [one for one in json_lines(loop, "adapter") if one["event"] == "engine lost, asking another"]
    expected = {"run_id": row.run_id, "rollout_id": row.id, "attempt": 1, "trace_id": rollout.trace}
    assert lost.items() >= expected.items() and lost["turn"] == found["turn"][0].attributes["ratchet.turn_id"]


def check_facts(found: dict[str, list[CollectedSpan]], run_id: str) -> None:
    spans = [one for same in found.values() for one in same]
    assert {one.attributes.get("ratchet.run_id", run_id) for one in spans} == {run_id}
    agent, grade, tests = (found[name][-1] for name in ("agent", "grade", "tests"))
    assert agent.attributes["ratchet.attempt"] == len(found["attempt"]) and agent.attributes["ratchet.try"] >= 1
    assert (agent.attributes["ratchet.agent_exit"], agent.attributes["ratchet.num_turns"]) == ("done", 2)
    assert grade.attributes["ratchet.verdict"] == "solved" and tests.attributes["ratchet.exit_code"] == 0
    assert agent.attributes["ratchet.box"] != grade.attributes["ratchet.box"]
    assert {one.service for one in spans} == {"ratchet-worker", "ratchet-adapter"}


async def check_engine(loop: Loop, requests: list[CollectedSpan]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        seen = (await http.get(f"http://127.0.0.1:{loop.stack.ports['engine']}/calls")).json()["calls"]
    told = {f"00-{one.trace}-{one.id}-01" for one in requests}
    assert told and told <= {one["traceparent"] for one in seen}


async def check_turns(loop: Loop, turns: list[CollectedSpan], rollout_id: int) -> None:
    statement = select(TurnTable.id, TurnTable.prompt_tokens, TurnTable.num_sampled)
    async with loop.database.begin() as connection:
        stored = (await connection.execute(statement.where(TurnTable.rollout_id == rollout_id))).all()
    names = ("ratchet.turn_id", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    assert sorted(tuple(one.attributes[name] for name in names) for one in turns) == sorted(map(tuple, stored))


async def test_log_lines_have_the_ids_of_their_stage(loop: Loop) -> None:
    await loop.script("Done.", hold="deadline")
    limits = {"agent_seconds": 2, "eval_seconds": 20}
    handle = await loop.start(loop.dataset(**TASK), limits=limits)
    _, row = await finish(loop, handle)
    await loop.release("deadline")
    assert (row.agent_exit, row.outcome) == ("time_budget", "graded")
    lines = [one for one in json_lines(loop, "worker") if one.get("rollout_id") == row.id]
    line = next(one for one in lines if one["event"] == "agent at its deadline")
    expected = {"stage": "agent", "attempt": 1, "run_id": row.run_id, "workflow_id": handle.id}
    assert line.items() >= expected.items() and line["trace_id"] == (await trace_of(loop, row.id)).hex
    for part in ("worker", "adapter", "gateway"):  # every line is JSON
        lines = list(json_lines(loop, part))
        assert lines and all({"event", "level", "timestamp"} <= one.keys() and one["part"] == part for one in lines)


async def test_a_retried_stage_is_another_span_with_its_number(loop: Loop) -> None:
    await loop.script("Done.", hold="traced")
    handle = await loop.start(loop.dataset(**TASK))

    async def is_asking() -> Any:
        row = await loop.rollout(handle)
        if row is None:
            return None
        async with loop.database.begin() as connection:
            return (await connection.execute(select(TurnTable.id).where(TurnTable.rollout_id == row.id))).first()

    await loop.until(is_asking, "the agent has called")
    loop.end("worker", kill=True)
    loop.spawn("worker")
    await loop.release("traced")
    _, row = await finish(loop, handle)
    found = await spans_of(loop, row.id, "rollout", "turn", "agent")
    agent, attempt, turn = (found[name][0] for name in ("agent", "attempt", "turn"))  # none of the killed worker
    assert agent.attributes["ratchet.try"] > 1 and agent.attributes["ratchet.attempt"] == 1
    assert agent.parent == turn.parent == attempt.id


@pytest.mark.parametrize("fault", ["hangs", "refuses"])
async def test_a_lost_collector_costs_only_spans(loop: Loop, fault: str) -> None:
    loop.collector.hangs = fault == "hangs"
    loop.collector.status = 400 if fault == "refuses" else 200
    try:
        num_requests = loop.collector.num_requests
        await loop.script(call("echo two > a.txt"), "Done.")
        _, row = await finish(loop, await loop.start(loop.dataset(**TASK)))
        assert (row.outcome, row.reward, row.num_turns) == ("graded", 1.0, 2)

        async def is_said() -> bool:
            return all("spans lost" in loop.log(part).read_text() for part in ("worker", "adapter"))

        await loop.until(is_said, "the loss is logged", 60)
        assert loop.collector.num_requests > num_requests
    finally:
        loop.collector.hangs = False
        loop.collector.status = 200
        loop.collector.released.set()
        loop.collector.released = threading.Event()
    for part in ("worker", "adapter"):
        said = [one for one in json_lines(loop, part) if one["event"] == "spans lost" and "reason" in one]
        assert said and all(one["number"] > 0 and "collector" in one["reason"] for one in said)
