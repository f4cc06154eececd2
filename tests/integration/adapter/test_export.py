"""A run's samples, written in every format and loaded again with the libraries that others use.

An export must have the same tokens as the store.
"""

import asyncio
import os
import subprocess
import sys
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
from store.schema import BatchTable, MetricTable, RolloutTable, TurnTable
from tests.integration.adapter.conftest import Opened, ScriptedEngine, open_rollout
from tests.integration.adapter.test_durability import ask
from training.sample_export import dump_graded, export_run

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
        member = {"rollout_id": opened.rollout_id, "group_id": 1, "advantage": ADVANTAGE}
        await conn.execute(
            insert(BatchTable).values(run_id="run-1", step=3, members=[member], denominators=[], knobs={}, seed=0)
        )
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
async def test_parquet_opens_in_datasets(finished: list[Any], database: Database, tmp_path: Path) -> None:
    from datasets import load_dataset

    assert await export(database, tmp_path, "parquet") == {tmp_path / "samples.parquet": 3}
    loaded = load_dataset(
        "parquet", data_files=str(tmp_path / "samples.parquet"), cache_dir=str(tmp_path / "cache"), split="train"
    )
    rows = list(loaded)
    check(rows, finished, tokens="input_ids")
    assert all(
        len(row["completion_mask"]) == len(row["input_ids"]) and sum(row["completion_mask"]) == sum(row["loss_mask"])
        for row in rows
    )
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


async def test_rollouts_are_dumped_once_as_they_are_graded(
    finished: list[Any], database: Database, tmp_path: Path
) -> None:
    rollout_id = finished[0].rollout_id
    pattern = str(tmp_path / "dumps" / "rollout_{rollout_id}")
    async with database.begin() as conn:
        await conn.execute(update(RolloutTable).values(ended_at=func.now()))
        newest = await dump_graded(conn, "run-1", pattern + ".json")
        assert newest is not None
        await dump_graded(conn, "run-1", pattern + ".pt")
    written = tmp_path / "dumps" / f"rollout_{rollout_id}.json"
    dump = orjson.loads(written.read_bytes())
    assert (dump["rollout_id"], len(dump["samples"])) == (rollout_id, 3)
    loaded = torch.load(written.with_suffix(".pt"), weights_only=True)
    assert [one["response_length"] for one in loaded["samples"]] == [one["response_length"] for one in dump["samples"]]
    written.write_text("mine")
    async with database.begin() as conn:
        await dump_graded(conn, "run-1", pattern + ".json")
        assert written.read_text() == "mine", "a file that is there is not written again"
        written.unlink()
        assert await dump_graded(conn, "run-1", pattern + ".json", newest) == newest
    assert not written.exists(), "it was graded before"
