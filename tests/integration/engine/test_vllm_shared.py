"""The real vLLM with the adapters of two runs: each answers its own calls, is updated alone, and survives a kill.

`make slow` runs it, in two minutes on idle cores, since vLLM starts twice.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from sqlalchemy import update

from engine import policy_files
from engine.client import EngineClient
from engine.generate_request import Sampling
from engine.generation import Generation, SampledTokens
from engine.weight_update import load_from_files, score_canary, update_engine
from ratchet.lora_slots import version_in_label
from ratchet.types import EngineState
from store import engines, runs
from store.database import Database
from store.engines import PublishedPolicy
from store.schema import EngineTable
from tests.integration.engine.real_vllm import (
    IDS,
    add_run,
    make_endless_base,
    metrics_client,
    publish,
    record,
    truth,
    wait_for_engine,
    wait_for_tokens,
    wrapper,
    wrapper_settings,
)
from tests.integration.engine.test_vllm_lora import Adapter, merged_scores, publish_adapter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*"),
]
SLOTS = {"a": 1, "b": 2}
RANKS = {"a": 8, "b": 4}
STEPS = {"a": (1, 2), "b": (1,)}


@dataclass
class Published:
    """The adapters of both runs, on disk; `sync` inserts the row of one and brings the engine to it."""

    database: Database
    client: EngineClient
    root: Path
    adapters: dict[tuple[str, int], Adapter]

    async def sync(self, run_id: str, step: int) -> PublishedPolicy:
        files, scores = self.adapters[run_id, step]
        policy = await record(self.database, step, self.root / f"{run_id}{step}.e1", files, scores, run_id)
        async with self.database.begin() as connection:
            [row] = await engines.list_engines(connection, "default")
            version = await runs.newest_version(connection, run_id)
        assert version is not None and version.version == policy.version
        slot = SLOTS[run_id]
        transfer = load_from_files(version, self.root, slot)
        await update_engine(self.database, row, version, transfer, keep_cache=False, slot=slot)
        return policy


async def test_two_adapters_answer_their_own_calls(database: Database, postgres_url: str, tmp_path: Path) -> None:
    base, root = make_endless_base(tmp_path / "base"), tmp_path / "policies"
    publish(root, "0.e1", base, 0)
    zero = root / "0.e1"
    adapters: dict[tuple[str, int], Adapter] = {}
    for run_id, slot in SLOTS.items():
        await add_run(database, run_id, slot)
        await record(database, 0, zero, policy_files.describe_files(zero), truth(zero).tolist(), run_id)
        for step in STEPS[run_id]:
            directory = root / f"{run_id}{step}.e1"
            files = publish_adapter(zero, directory, 10 * slot + step, RANKS[run_id])
            adapters[run_id, step] = (files, merged_scores(directory, zero))
    settings = wrapper_settings(base, tmp_path, root, postgres_url, lora_rank=8, lora_runs=2)
    async with wrapper(settings) as process, EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == "a/0.e1;b/0.e1" == await client.version()
        for slot in SLOTS.values():
            np.testing.assert_allclose(await client.score(IDS, slot), truth(zero), atol=1e-3)
        async with metrics_client(settings) as server:
            await update_while_both_are_asked(Published(database, client, root, adapters), server)
        process.kill()
        await asyncio.to_thread(process.wait)

    async with database.begin() as connection:
        await connection.execute(update(EngineTable).values(state=EngineState.GONE))
    async with wrapper(settings), EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == "a/2.e1;b/1.e1" == await client.version()
        for run_id, slot in SLOTS.items():
            expected = adapters[run_id, STEPS[run_id][-1]][1]
            np.testing.assert_allclose(await client.score(IDS, slot), expected, atol=1e-3)


async def update_while_both_are_asked(published: Published, server: httpx.AsyncClient) -> None:
    """Each slot is updated while calls of both are in flight; the tokens have the versions of their own run."""
    client = published.client
    sampled = await wait_for_tokens(server)
    calls = {run_id: asyncio.create_task(ask(client, run_id)) for run_id in SLOTS}
    policies = {}
    for run_id, step in (("a", 1), ("b", 1), ("a", 2)):
        for _ in range(2):
            sampled = await wait_for_tokens(server, sampled + 32)
        policies[run_id] = await published.sync(run_id, step)
    await wait_for_tokens(server, await wait_for_tokens(server) + 32)
    found = {run_id: await call for run_id, call in calls.items()}
    for run_id, generation in found.items():
        versions = [span["version"] for span in generation.version_spans]
        assert versions == [f"{run_id}/{step}.e1" for step in (0, *STEPS[run_id])] and generation.logprobs_valid
        slot, cut = SLOTS[run_id], generation.version_spans[-1]["start"]
        rescored = (await client.score([*IDS, *generation.token_ids.tolist()], slot))[len(IDS) - 1 :]
        assert float(np.abs(rescored - generation.logprobs)[cut + 1 :].max()) < 0.05
        own, other = policies[run_id].canary, policies["b" if run_id == "a" else "a"].canary
        assert own is not None and other is not None
        assert (await score_canary(client, own, slot=slot)).max_gap < 1e-2
        assert (await score_canary(client, other, slot=slot)).reason is not None, "the adapters differ"


async def ask(client: EngineClient, run_id: str) -> Generation:
    slot = SLOTS[run_id]
    sampled = SampledTokens(version_of=lambda label: version_in_label(label, slot))
    # Without a seed: on a CPU, vLLM 0.32 cannot compute the contexts of several calls with seeds again after a pause.
    return await client.generate(IDS, Sampling(3000, 1.0), f"turn-{run_id}", f"{run_id}/0.e1", sampled, slot)
