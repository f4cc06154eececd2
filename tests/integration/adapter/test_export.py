"""A run's samples, written in every format and loaded again with the libraries that others use.

An export must have the same tokens as the store.
"""

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from sqlalchemy import func, insert, select, update

from adapter.prompt.renderer import Renderer
from adapter.turns.loss_mask import build_chains
from ratchet.errors import ConfigError
from store import chains, fork_report, metrics, turns
from store.arrays import ids_from_bytes, logprobs_from_bytes
from store.database import Database
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    MetricTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TurnTable,
)
from tests.integration.adapter.conftest import Opened, ScriptedEngine, open_rollout
from tests.integration.adapter.test_durability import ask
from training.sample_export import dump_steps, export_run

REWARD = 1.0
ADVANTAGE = 0.25


@pytest.fixture
async def finished(adapter: str, engine: ScriptedEngine, database: Database, opened: Opened) -> list[Any]:
    """The rows of a main conversation of two turns, a sub-agent's of one, and a title: three chains, two of them
    trained.
    """
    await engine.say("main one", "sub agent", "a title", "main two")
    first: list[Any] = [{"role": "user", "content": "fix the thing"}]
    reply = (await ask(adapter, opened.token, messages=first)).json()["choices"][0]["message"]
    await ask(adapter, opened.token, {"x-claude-code-agent-id": "a1"}, [{"role": "user", "content": "look for it"}])
    await ask(adapter, opened.token, messages=[{"role": "user", "content": "Generate a short title for this"}])
    await ask(adapter, opened.token, messages=[*first, reply, {"role": "user", "content": "go on"}])
    rows = await opened.wait_delivered(4)
    second = await open_rollout(database, 1)  # it has no outcome, so it is not exported
    async with database.begin() as conn:
        built = build_chains(await turns.load_metas(conn, opened.rollout_id, 1))
        await chains.replace_chains(conn, opened.rollout_id, built)
        verdict = {
            "outcome": "graded",
            "reward": REWARD,
            "num_chains": sum(1 for one in built if one.num_trained),
            "agent_exit": "done",
        }
        await conn.execute(update(RolloutTable).where(RolloutTable.id == opened.rollout_id).values(**verdict))
        member = {"rollout_id": opened.rollout_id, "group_id": 1, "reward": REWARD, "advantage": ADVANTAGE}
        await conn.execute(
            insert(BatchTable).values(run_id="run-1", step=3, members=[member], denominators=[], knobs={}, seed=0)
        )
        task = select(RolloutTable.task_id).where(RolloutTable.id == opened.rollout_id).scalar_subquery()
        of_group = {"run_id": "run-1", "group_no": 1, "purpose": "train", "workflow_id": "group", "task_id": task}
        made = insert(RolloutGroupTable).values(**of_group, size=2, min_graded=1, temperature=1.0)
        group = (await conn.execute(made.returning(RolloutGroupTable.id))).scalar_one()
        values = {"group_id": group, "ended_at": func.now()}
        await conn.execute(update(RolloutTable).where(RolloutTable.id == opened.rollout_id).values(**values))
        await conn.execute(insert(BatchItemTable).values(run_id="run-1", group_id=group, step=3, use="trained"))
    assert second.rollout_id != opened.rollout_id
    return rows


async def export(database: Database, out: Path, *formats: str) -> dict[Path, int]:
    async with database.begin() as conn:
        return await export_run(conn, "run-1", formats, out)


def check(samples: list[dict[str, Any]], rows: list[Any], tokens: str = "tokens") -> None:
    """Each sampled token is at its place with its logprob and is trained once; rewards of samples add up to the
    rollout's.
    """
    main, sub, title, again = rows
    by_turn = {row.id: row for row in rows}
    assert len(samples) == 3 and [sum(one["loss_mask"]) > 0 for one in samples].count(True) == 2
    trained = {one.id: 0 for one in rows}
    for sample in samples:
        ids = np.asarray(sample[tokens])
        length = sample["response_length"]
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == len(sample["turn_ids"]) == length
        response = {
            name: np.asarray(sample[name]) for name in ("loss_mask", "rollout_log_probs", "turn_ids", "policy_steps")
        }
        for turn_id in dict.fromkeys(response["turn_ids"].tolist()):
            row = by_turn[turn_id]
            here = response["turn_ids"] == turn_id
            sampled = ids_from_bytes(row.sampled_ids)
            assert ids[-length:][here][-len(sampled) :].tolist() == sampled.tolist()
            assert (
                response["rollout_log_probs"][here][-len(sampled) :].tolist()
                == logprobs_from_bytes(row.logprobs).tolist()
            )
            trained[turn_id] += int(response["loss_mask"][here].sum())
        assert (sample["rollout_reward"], sample["num_chains"], sample["advantage"], sample["step"]) == (
            REWARD,
            2,
            ADVANTAGE,
            3,
        )
        assert sample["remove_sample"] == (not any(sample["loss_mask"])) and sample["status"] == "completed"
        assert sample["rollout_id"] == main.rollout_id and sample["weight_versions"] == ["default"]
    assert sum(one["reward"] for one in samples) == REWARD
    assert trained == {main.id: main.num_sampled, sub.id: sub.num_sampled, title.id: 0, again.id: again.num_sampled}


async def test_json_lines(finished: list[Any], database: Database, tmp_path: Path) -> None:
    assert await export(database, tmp_path, "jsonl") == {tmp_path / "samples.jsonl": 3}
    check([orjson.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()], finished)


async def test_debug_dumps_load_with_weights_only(finished: list[Any], database: Database, tmp_path: Path) -> None:
    import torch

    path = tmp_path / "rollout_dumps" / "rollout_3.pt"
    assert await export(database, tmp_path, "pt") == {path: 3}
    loaded = torch.load(path, weights_only=True)
    assert loaded["rollout_id"] == 3 and loaded["samples"][0]["tokens"].dtype is torch.int32
    assert loaded["samples"][0]["metadata"]["outcome"] == "graded"
    check(loaded["samples"], finished)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
async def test_json_lines_open_in_datasets(finished: list[Any], database: Database, tmp_path: Path) -> None:
    from datasets import load_dataset

    assert await export(database, tmp_path, "jsonl") == {tmp_path / "samples.jsonl": 3}
    files = {"data_files": str(tmp_path / "samples.jsonl"), "cache_dir": str(tmp_path / "cache")}
    check(list(load_dataset("json", split="train", **files)), finished)
    assert not list(tmp_path.glob(".*.partial"))


async def test_forks_are_counted_and_the_template_is_named(
    finished: list[Any], database: Database, renderer: Renderer
) -> None:
    async with database.begin() as conn:
        found = await fork_report.fork_report(conn, "run-1")
        provenance = (
            await conn.execute(select(RolloutTable.provenance).where(RolloutTable.id == finished[0].rollout_id))
        ).scalar_one()
    assert found.causes == {"root": 2, "sub_agent": 1, "none": 1} and found.kinds == {
        "main": 2,
        "sub_agent": 1,
        "auxiliary": 1,
    }
    assert (found.num_rollouts, found.most_chains, found.alarms) == (1, 2, [])
    assert provenance == {"template_digest": renderer.template.digest, "chat_template_kwargs": {}}


async def test_drift_and_unexplained_chains_raise_an_alarm(finished: list[Any], database: Database) -> None:
    async with database.begin() as conn:
        await conn.execute(update(TurnTable).where(TurnTable.id == finished[3].id).values(fork_cause="drift"))
        await conn.execute(update(RolloutTable).where(RolloutTable.id == finished[0].rollout_id).values(num_chains=6))
        found = await fork_report.fork_report(conn, "run-1")
        await metrics.record_metrics(conn, "run-1", 3, found.numbers())
        recorded = dict(
            (
                await conn.execute(
                    select(MetricTable.name, MetricTable.value).where(
                        MetricTable.run_id == "run-1", MetricTable.step == 3
                    )
                )
            ).all()
        )
    alarms = found.alarms
    assert (recorded["fork_alarms"], recorded["fork_drift_share"]) == (2.0, 0.25)
    assert len(alarms) == 2 and "1 of 4 turns drifted" in alarms[0] and f"{finished[0].rollout_id} (K=6)" in alarms[1]


async def test_an_unknown_run_is_refused_with_a_sentence(database: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run 'run-1'"):
        await export(database, tmp_path, "jsonl")
    assert not list(tmp_path.iterdir())


async def test_the_commands_give_the_same_results(finished: list[Any], postgres_url: str, tmp_path: Path) -> None:
    """As an operator runs them: in other processes that have only the store's address."""

    async def ratchet(*arguments: str) -> Any:
        environment = {**os.environ, "RATCHET_DATABASE_URL": postgres_url, "RATCHET_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-m", "cli.main", *arguments, "--json"]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, cwd=tmp_path, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stderr.decode()
        return orjson.loads(done.stdout)

    assert (await ratchet("show", "forks", "run-1"))["causes"] == {"root": 2, "sub_agent": 1, "none": 1}
    out = tmp_path / "samples"
    found = await ratchet("admin", "export", "run-1", "--format", "jsonl", "--format", "pt", "--out", str(out))
    assert found == {str(out / "samples.jsonl"): 3, str(out / "rollout_dumps" / "rollout_3.pt"): 3}
    check([orjson.loads(line) for line in (out / "samples.jsonl").read_bytes().splitlines()], finished)


async def test_every_rollout_of_a_step_is_dumped_once(finished: list[Any], database: Database, tmp_path: Path) -> None:
    """Those of its groups, with a verdict or without one; others once the run has ended."""
    pattern, graded = str(tmp_path / "dumps" / "rollout_{rollout_id}.pt"), finished[0].rollout_id

    async def dump() -> dict[str, int]:
        async with database.begin() as conn:
            found = await dump_steps(conn, "run-1", pattern, again=False)
        return {path.stem.removeprefix("rollout_"): number for path, number in found.items()}

    async with database.begin() as conn:
        columns = select(RolloutTable.group_id, RolloutTable.task_id).where(RolloutTable.id == graded)
        of_step, task = (await conn.execute(columns)).one()
        for no, (purpose, label, outcome) in enumerate([("train", "", None), ("eval", "end", "infra_failed")]):
            of_group = {"run_id": "run-1", "size": 2, "min_graded": 1, "temperature": 1.0, "purpose": purpose}
            row = {"label": label, "group_no": 50 + no, "workflow_id": f"group-{no}", "task_id": task}
            made = insert(RolloutGroupTable).values(**of_group, **row).returning(RolloutGroupTable.id)
            groups = [(await conn.execute(made)).scalar_one(), of_step]
            for member, group in enumerate(groups):
                key = {"group_id": group, "member": 5 + 2 * no + member, "workflow_id": f"rollout-{no}-{member}"}
                values = {"run_id": "run-1", "task_id": task, "harness": "x", "temperature": 1.0, "purpose": purpose}
                await conn.execute(insert(RolloutTable).values(**key, **values, outcome=outcome))
        evaluation = {"run_id": "run-1", "label": "end", "step": 4, "temperature": 1.0, "num_samples": 1}
        await conn.execute(insert(EvaluationTable).values(**evaluation, policy_version="run-1/4.e1"))
    assert await dump() == {}, "a rollout of the step goes on"
    async with database.begin() as conn:
        await conn.execute(update(RolloutTable).values(ended_at=func.now()))
    assert await dump() == {"3": 5}, "three chains, and two rollouts without one"
    loaded = torch.load(pattern.replace("{rollout_id}", "3"), weights_only=True)
    assert loaded["rollout_id"] == 3
    check([one for one in loaded["samples"] if one["rollout_id"] == graded], finished)
    failed = [one for one in loaded["samples"] if one["rollout_id"] != graded]
    assert sorted(one["status"] for one in failed) == ["failed", "pending"]
    assert {(one["reward"], one["remove_sample"], len(one["tokens"])) for one in failed} == {(None, True, 0)}
    assert await dump() == {}, "a file that is there is not written again"
    async with database.begin() as conn:
        await conn.execute(update(RunTable).values(state="done"))
    assert await dump() == {"eval_4": 1, "unused": 2}, "one of a group that no step has used, and one of none"


async def test_a_file_that_is_older_than_its_step_is_replaced(
    finished: list[Any], database: Database, tmp_path: Path
) -> None:
    """An earlier run wrote it, or an earlier plan of the step."""
    path, hours = tmp_path / "rollout_3.pt", [datetime(2026, 1, 1, hour, tzinfo=UTC) for hour in range(4)]

    async def is_replaced(written_at: datetime) -> bool:
        path.write_bytes(b"of another run")
        os.utime(path, (written_at.timestamp(), written_at.timestamp()))
        async with database.begin() as conn:
            found = await dump_steps(conn, "run-1", str(tmp_path / "rollout_{rollout_id}.pt"), again=False)
        return bool(found) and len(torch.load(path, weights_only=True)["samples"]) == 3

    async with database.begin() as conn:
        await conn.execute(update(RolloutTable).values(ended_at=hours[1]))
        await conn.execute(update(BatchTable).values(planned_at=hours[1]))
    assert await is_replaced(hours[0]) and not await is_replaced(hours[2])
    async with database.begin() as conn:
        await conn.execute(update(BatchTable).values(planned_at=hours[3]))
    assert await is_replaced(hours[2])
