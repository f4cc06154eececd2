"""The versions of a run have their times, and commands are counted in the rollouts that the page says."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import insert, select

from ratchet.types import EngineState, SteeringAction, policy_version
from reads.commands import sample_judged_rollouts, within_turns
from store import engines, steering
from store.database import Database
from store.metrics import record_metrics
from store.schema import PolicyVersionTable, RolloutGroupTable
from store.steering import Request
from tests.integration.viewer.filled_store import FilledRun, RunFiller
from viewer.rendering import clock_time


async def test_each_version_has_the_time_of_its_publication(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    moments = []
    async with database.begin() as connection:
        for step in (1, 2):
            version = policy_version(filled.run_id, step, 1)
            values = {"version": version, "run_id": filled.run_id, "step": step, "epoch": 1, "uri": "", "files": []}
            adding = insert(PolicyVersionTable).values(**values).returning(PolicyVersionTable.created_at)
            moments.append((await connection.execute(adding)).scalar_one())
        await record_metrics(connection, filled.run_id, 2, {"sync_seconds": 12.0})
        engine = await engines.register_engine(connection, "http://127.0.0.1:1", "model", {})
        for _ in range(2):  # a repeated call is one load
            await engines.set_engine_version(connection, engine, policy_version(filled.run_id, 1, 1))
    async with database.begin() as connection:
        await engines.set_engine_state(connection, engine, EngineState.STARTING, EngineState.READY)
        await engines.begin_engine_pause(connection, engine, 60)
        assert await engines.end_engine_pause(connection, engine, policy_version(filled.run_id, 2, 1))
        assert not await engines.end_engine_pause(connection, engine, policy_version(filled.run_id, 1, 1))
    page = (await client.get(f"/runs/{filled.run_id}/versions.json")).json()
    listed = [(one["step"], one["sync_seconds"], one["num_loads"]) for one in page["versions"] if one["step"]]
    assert listed == [(2, 12.0, 1), (1, None, 1)]
    second, first = page["versions"][:2]
    assert first["last_loaded_at"] < second["first_loaded_at"] == second["last_loaded_at"]
    html = (await client.get(f"/runs/{filled.run_id}/versions")).text
    assert all(f"<td>{clock_time(one)}</td>" in html for one in moments) and "12 s" in html
    async with database.begin() as connection:
        lost = {"version": policy_version(filled.run_id, 2, 2), "run_id": filled.run_id, "step": 2, "epoch": 2}
        await connection.execute(insert(PolicyVersionTable).values(**lost, uri="", files=[]))
    listed = [
        (one["version"][-1], one["sync_seconds"], one["num_loads"])
        for one in (await client.get(f"/runs/{filled.run_id}/versions.json")).json()["versions"][:2]
    ]
    assert listed == [("2", None, 0), ("1", 12.0, 1)], "the step's metric is of the version that was loaded"
    assert "no engine loaded it" in (await client.get(f"/runs/{filled.run_id}/versions")).text
    earlier = (await client.get(f"/runs/{filled.run_id}/versions.json?before=2")).json()
    assert [one["step"] for one in earlier["versions"]] == [one["step"] for one in page["versions"][1:]]


async def test_what_people_asked_is_on_the_run_and_on_the_group(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        first = select(RolloutGroupTable.id, RolloutGroupTable.workflow_id).where(
            RolloutGroupTable.run_id == filled.run_id
        )
        groups = (await connection.execute(first.order_by(RolloutGroupTable.id).limit(2))).all()
        asked = [
            (SteeringAction.SET, "training.learning_rate", 1e-3, 1e-4, "too fast"),
            (SteeringAction.CANCEL, groups[0].workflow_id, "open", "cancelled", "a bad task"),
            (SteeringAction.SKIP_STEP, "step/2", [groups[1].workflow_id], "discarded", "a suspect batch"),
        ]
        for number, (action, target, before, after, reason) in enumerate(asked):
            request = Request(filled.run_id, f"request-{number}", "anna@desk", reason)
            await steering.record(connection, request, action, target, before, after, 3)
    page = (await client.get(f"/runs/{filled.run_id}/steering.json")).json()
    assert [one["reason"] for one in page["requests"]] == ["a suspect batch", "a bad task", "too fast"]
    assert page["requests"][-1]["what"] == "set training.learning_rate: 0.001 → 0.0001"
    links = [one["link"] for one in page["requests"]]
    assert links == [f"/runs/{filled.run_id}/steps/2", f"/groups/{groups[0].id}", ""]
    assert "anna@desk" in (await client.get(f"/runs/{filled.run_id}/steering")).text
    for group, word in zip(groups, ("a bad task", "a suspect batch"), strict=True):
        html = (await client.get(f"/groups/{group.id}")).text
        assert "asked by anna@desk at" in html and word in html and "too fast" not in html


async def test_commands_of_a_step_and_of_a_run(client: httpx.AsyncClient, filled: FilledRun) -> None:
    async def commands(query: str = "") -> dict[str, Any]:
        found: dict[str, Any] = (await client.get(f"/runs/{filled.run_id}/commands.json?{query}")).json()
        return found

    whole = await commands()
    assert (whole["num_unsolved"], whole["num_solved"], whole["num_judged"]) == (2, 2, 4)
    cat = {"command": "cat", "num_unsolved": 1, "num_solved": 1, "num_uses": 2, "newest_unsolved": filled.unsolved}
    cat["difference"] = 0.0
    assert whole["commands"] == [cat]
    counts = {one: (found["num_unsolved"], found["num_solved"]) for one in ("train", "eval")
              if (found := await commands(f"purpose={one}"))}  # fmt: skip
    assert counts == {"train": (2, 1), "eval": (0, 1)}
    step = await commands("step=1&by_line=true")
    assert (step["num_unsolved"], step["num_solved"]) == (2, 1), "the evaluation is in no step"
    assert [one["command"] for one in step["commands"]] == ["cat calc.py -n", "cat calc.py"]
    for query, words in (("step=x", "step is a number"), ("turns=20001", "turns"), ("purpose=x", "purpose")):
        answer = await client.get(f"/runs/{filled.run_id}/commands?{query}")
        assert answer.status_code == 422 and words in answer.text


async def test_commands_are_counted_all_over_the_run(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        group = await filler.group(50, filled.task, "ready")
        for member in range(16):
            ended = {"outcome": "graded", "reward": 0.0, "num_turns": 5}
            await filler.verdict(await filler.rollout(group, filled.task, member, **ended), False)
        every = (await sample_judged_rollouts(connection, filled.run_id, None, None, 1000)).rollouts
        ids = [one.rollout_id for one in every]
        assert len(ids) == 20 and ids == sorted(ids)
        for size in (1, 3, 7, 19, 20, 21):
            sample = await sample_judged_rollouts(connection, filled.run_id, None, None, size)
            places = [ids.index(one.rollout_id) for one in sample.rollouts]
            gaps = {after - before for before, after in pairwise(places)}
            assert len(places) == min(size, 20) == len(set(places)) and sample.number == 20
            assert not gaps or max(gaps) - min(gaps) <= 1, "they are evenly spread"
        kept = within_turns(every, 30)
        assert [one.rollout_id for one in kept] == ids[::4], "100 turns are too many, and so are 50"
    page = (await client.get(f"/runs/{filled.run_id}/commands.json?turns=30")).json()
    assert page["num_unsolved"] + page["num_solved"] == 5 and page["num_judged"] == 20
    html = (await client.get(f"/runs/{filled.run_id}/commands?turns=30")).text
    assert "5 rollouts of 20 with a verdict, evenly spread" in html and "Count by first lines instead" in html
    assert "All 20 rollouts with a verdict" in (await client.get(f"/runs/{filled.run_id}/commands")).text
