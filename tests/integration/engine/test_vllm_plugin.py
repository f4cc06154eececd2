"""The real vLLM under its wrapper: start, in-flight update, refused update, lapsed pause, kill -9.

Only the real server shows that weights, labels and caches change together. `make slow` runs it, in two minutes on idle
cores, since vLLM starts twice.
"""

import asyncio
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import func, select, update
from temporalio.testing import ActivityEnvironment

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from engine.client import EngineClient
from engine.generate_request import Sampling
from engine.policy_files import file_sha256
from engine.process import EngineSettings, session_members
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import EngineUnavailableError
from ratchet.payloads import SyncInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState
from store import engines
from store.database import Database
from store.schema import EngineTable, MetricTable
from tests.integration.engine.real_vllm import (
    IDS,
    PATIENCE_SECONDS,
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # vLLM starts twice: a minute each on idle cores, ten on busy ones


def shard(root: Path, name: str, source: str) -> tuple[list[str], list[str]]:
    """Split the weights of `source` into two files; return their names relative to the root, and their digests."""
    weights = load_file(root / source / "model.safetensors")
    (root / name).mkdir()
    halves = [sorted(weights)[: len(weights) // 2], sorted(weights)[len(weights) // 2 :]]
    names = [f"{name}/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path, half in zip(names, halves, strict=True):
        save_file({key: weights[key] for key in half}, root / path, metadata={"format": "pt"})
    return names, [file_sha256(root / path) for path in names]


async def metrics_of(database: Database, step: int) -> dict[str, float]:
    async with database.begin() as conn:
        rows = await conn.execute(
            select(MetricTable.name, MetricTable.value).where(MetricTable.run_id == "run-1", MetricTable.step == step)
        )
        return {name: value for name, value in rows}


def server_pid(settings: EngineSettings) -> int:
    return int(settings.pidfile.read_text().splitlines()[1].split()[0])


async def test_weights_move_with_their_label(
    database: Database, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = make_endless_base(tmp_path / "base"), tmp_path / "policies"
    await add_run(database)
    first = (await record(database, 0, root / "step-0", publish(root, "step-0", base, 0))).version
    files = {step: publish(root, f"step-{step}", base, step) for step in (1, 2)}
    settings = wrapper_settings(base, tmp_path, root, postgres_url)
    server = metrics_client(settings)
    async with wrapper(settings) as process, EngineClient(settings.address) as client, server:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == first == await client.version()
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-0"), atol=1e-3)

        scored = await wait_for_tokens(server)

        # in flight: one answer carries both labels
        call = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=1), "turn-1", first))
        await wait_for_tokens(server, scored)
        started = time.monotonic()
        await client.pause()
        sampled = await wait_for_tokens(server)
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        await client.finish_update("run-1/1.e1")
        await client.resume()
        resumed = time.monotonic() - started
        await wait_for_tokens(server, sampled)
        print({"pause_seconds": round(resumed, 3), "first_token_seconds": round(time.monotonic() - started, 3)})
        generation = await call
        assert [span["version"] for span in generation.version_spans] == ["run-1/0.e1", "run-1/1.e1"]
        assert generation.logprobs_valid
        after = await client.score(IDS)
        np.testing.assert_allclose(after, truth(root / "step-1"), atol=1e-3)
        # the recorded logprobs after the switch are those of the new weights over the whole context
        cut = generation.version_spans[1]["start"]
        rescored = (await client.score([*IDS, *generation.token_ids.tolist()]))[len(IDS) - 1 :]
        assert float(np.abs(rescored - generation.logprobs)[cut + 1 :].max()) < 0.05

        # a bad digest, a path outside, a damaged second shard: nothing changes, and the server continues
        names, digests = shard(root, "step-2-sharded", "step-2")
        damaged = bytearray((root / names[1]).read_bytes())
        damaged[-9] ^= 1
        (root / names[1]).write_bytes(damaged)
        for bad, expected in (
            (["step-2/model.safetensors"], ["00" * 32]),
            (["../base/model.safetensors"], [file_sha256(base / "model.safetensors")]),
            (names, digests),
        ):
            await client.pause()
            await client.start_update()
            with pytest.raises(EngineUnavailableError):
                await client.update(bad, expected)
            await client.resume()
            assert await client.version() == "run-1/1.e1"
            np.testing.assert_allclose(await client.score(IDS), after, atol=1e-5)

        # digests that are checked before the pause, by both the caller and, if a file was changed since, the update
        assert await client.check_files(["step-2/model.safetensors"], [str(files[2][0]["sha256"])])
        with pytest.raises(EngineUnavailableError, match=r"would refuse the update.*00002-of-00002"):
            await client.check_files(names, digests)
        whole = shard(root, "step-2-again", "step-2")
        await asyncio.sleep(0.2)  # digests of younger files are not kept
        assert await client.check_files(*whole)
        (root / whole[0][1]).write_bytes(damaged)
        await client.pause()
        await client.start_update()
        with pytest.raises(EngineUnavailableError, match="no weight was changed"):
            await client.update(*whole)
        await client.resume()
        np.testing.assert_allclose(await client.score(IDS), after, atol=1e-5)

        # asked again without a root, it keeps the one that it has
        await client.init_weight_transfer()
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        await client.finish_update(None)
        np.testing.assert_allclose(await client.score(IDS), after, atol=1e-5)

        # abort by request id
        before = await wait_for_tokens(server)
        long = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=2), "turn-2"))
        await wait_for_tokens(server, before)
        await client.abort(["turn-2"])
        aborted = await asyncio.wait_for(long, PATIENCE_SECONDS)
        assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 3000

        # a sync that dies between update and finish: the wrapper loads the newest version and resumes
        second = (await record(database, 2, root / "step-2", files[2])).version
        async with database.begin() as conn:
            assert await engines.begin_engine_pause(conn, row.id, PATIENCE_SECONDS)
        await client.pause()
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        async with database.begin() as conn:
            await conn.execute(update(EngineTable).where(EngineTable.id == row.id).values(paused_until=func.now()))
        row = await wait_for_engine(database, EngineState.READY, PATIENCE_SECONDS)
        assert row.version == second == await client.version()
        assert not await client.is_paused()
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-2"), atol=1e-3)

        # kill -9 of the wrapper: its vLLM is gone, and the next wrapper ends what is left of it;
        # it skips a newest version whose files are incomplete
        killed = server_pid(settings)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while Path(f"/proc/{killed}").exists():
                await asyncio.sleep(0.1)
    torn_files = [{"name": "model.safetensors", "sha256": "00", "bytes": 0}]
    torn = (await record(database, 3, root / "step-3", torn_files)).version
    async with database.begin() as conn:
        await conn.execute(update(EngineTable).values(state=EngineState.GONE))
    async with wrapper(settings) as process, EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == second != torn
        assert session_members(killed, settings) == []
        vllm = server_pid(settings)
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-2"), atol=1e-3)

        # `learn.sync` as the workflow calls it: the engine becomes ready since its scores are those of the learner
        monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
        learn = LearnActivities(database, RunConfigs(database, load_temporal_settings()))
        files[4] = publish(root, "step-4", base, 4)
        fourth = (await record(database, 4, root / "step-4", files[4], truth(root / "step-4").tolist())).version
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=4, engine_id=row.id))
        assert (await wait_for_engine(database, EngineState.READY)).version == fourth
        said = await metrics_of(database, 4)
        print({name: round(value, 5) for name, value in said.items()})
        assert said["canary_gap_max"] < 0.01
        assert 0 < said["sync_pause_seconds"] < said["sync_first_token_seconds"] < said["sync_seconds"]

        # an update that silently does nothing: digests are right, the label changes, the weights do not
        await record(database, 5, root / "step-4", files[4], truth(root / "step-1").tolist())
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=5, engine_id=row.id))
        async with database.begin() as conn:
            assert not await engines.ready_engines(conn, DEFAULT_SET), "it may not serve until its canary passes"
        assert (await metrics_of(database, 5))["canary_gap_mean"] > 10 * said["canary_gap_mean"]
        assert await asyncio.to_thread(process.wait, PATIENCE_SECONDS) != 0, (
            "its wrapper ends, and the supervisor starts both again"
        )
        assert "quarantined (it" in (tmp_path / "engine.log").read_text(), "the log has the reason"
        assert session_members(vllm, settings) == []
