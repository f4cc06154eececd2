"""The real vLLM under its wrapper: start from a published policy, in-flight update, refused update, abandoned pause, kill -9.

Why here: only the real server shows that weights, labels and caches move together.
Called by: `make test` (marker `slow`: about two minutes).
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import insert, select, update
from temporalio.testing import ActivityEnvironment

from activities.learn import LearnActivities
from activities.run_configs import RunConfigs
from ratchet.engine_client import EngineClient, Sampling
from ratchet.errors import EngineUnavailableError
from ratchet.local.engine_process import EngineSettings, session_members
from ratchet.payloads import SyncInput
from ratchet.store import engines
from ratchet.store.database import Database
from ratchet.store.schema import Engine, Metric, PolicyVersion, Run
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState, policy_version
from tests.integration.adapter.conftest import free_port
from tests.standins.tiny_model import make_tokenizer, make_weights
from training.vllm_plugin import file_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # vLLM starts twice: a minute each on idle cores, four on busy ones
IDS = list(range(10, 60))


def publish(root: Path, name: str, source: Path, seed: int) -> list[dict[str, object]]:
    import torch

    directory = root / name
    directory.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(seed)
    weights = {key: (value + 0.02 * torch.randn_like(value)).contiguous() for key, value in load_file(source / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return [{"name": "model.safetensors", "sha256": file_sha256(directory / "model.safetensors"), "bytes": 0}]


def truth(model: Path) -> np.ndarray:
    """Logprobs of IDS[1:] by transformers: what the files say, whatever vLLM makes of them."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()  # type: ignore[no-any-return]


async def record(
    database: Database, root: Path, step: int, files: list[dict[str, object]], directory: str = "", claimed: Path | None = None
) -> str:
    """`claimed`: the weights that the version's canary was taken from."""
    version = policy_version("run-1", step, 1)
    uri = str(root / (directory or f"step-{step}"))
    canary = None if claimed is None else {"ids": IDS, "logprobs": truth(claimed).tolist()}
    async with database.begin() as conn:
        values = {"version": version, "run_id": "run-1", "step": step, "epoch": 1, "uri": uri, "files": files, "canary": canary}
        await conn.execute(insert(PolicyVersion).values(**values))
    return version


def shard(root: Path, name: str, source: str) -> tuple[list[str], list[str]]:
    """The weights of `source` as two files: their names below the root, and their digests."""
    weights = load_file(root / source / "model.safetensors")
    (root / name).mkdir()
    halves = [sorted(weights)[: len(weights) // 2], sorted(weights)[len(weights) // 2 :]]
    names = [f"{name}/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path, half in zip(names, halves, strict=True):
        save_file({key: weights[key] for key in half}, root / path, metadata={"format": "pt"})
    return names, [file_sha256(root / path) for path in names]


async def metrics_of(database: Database, step: int) -> dict[str, float]:
    async with database.begin() as conn:
        rows = await conn.execute(select(Metric.name, Metric.value).where(Metric.run_id == "run-1", Metric.step == step))
        return {name: value for name, value in rows}


async def wait_for_engine(database: Database, state: EngineState, timeout_seconds: float = 600) -> engines.EngineRow:
    async with asyncio.timeout(timeout_seconds):
        while True:
            async with database.begin() as conn:
                found = [row for row in await engines.list_engines(conn) if row.state is state]
            if found:
                return found[0]
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def wrapper(settings: EngineSettings) -> AsyncIterator[subprocess.Popen[bytes]]:
    program = (
        "import asyncio, sys; from ratchet.local.engine import run_engine; from ratchet.local.engine_process import EngineSettings; "
        "asyncio.run(run_engine(EngineSettings.model_validate_json(sys.argv[1])))"
    )
    log = (settings.state_dir / "engine.log").open("ab")
    process = subprocess.Popen([sys.executable, "-c", program, settings.model_dump_json()], stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)
        log.close()


def never_stop(model: Path) -> None:
    """Takes every end token away, so that a call lasts until its token limit."""
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        values = json.loads((model / name).read_text())
        for key in ("eos_token", "eos_token_id"):
            values.pop(key, None)
        (model / name).write_text(json.dumps(values))


async def add_run(database: Database) -> None:
    async with database.begin() as conn:
        values = {
            "run_id": "run-1",
            "config": {"datasets": [{"path": "unused.jsonl"}]},
            "config_digest": "",
            "config_name": "",
            "seed": 0,
            "model_path": "",
        }
        await conn.execute(insert(Run).values(**values))


async def test_weights_move_with_their_label(
    database: Database, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, root = tmp_path / "base", tmp_path / "policies"
    make_tokenizer(base)
    make_weights(base)
    never_stop(base)
    await add_run(database)
    first = await record(database, root, 0, publish(root, "step-0", base, 0))
    files = {step: publish(root, f"step-{step}", base, step) for step in (1, 2)}
    settings = EngineSettings(
        model_path=base,
        port=free_port(),
        database_url=postgres_url,
        state_dir=tmp_path,
        policies_root=root,
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=16,
        kv_cache_gib=1,
        num_threads=1,
        extra_args=("--enforce-eager",),
    )
    async with wrapper(settings) as process, EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == first == await client.version()
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-0"), atol=1e-3)

        # in flight: one answer carries both labels
        call = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=1), "turn-1", first))
        await asyncio.sleep(1.0)
        await client.pause()
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        await client.finish_update("run-1/1.e1")
        await client.resume()
        generation = await call
        assert [span["version"] for span in generation.version_spans] == ["run-1/0.e1", "run-1/1.e1"]
        assert generation.logprobs_valid
        after = await client.score(IDS)
        np.testing.assert_allclose(after, truth(root / "step-1"), atol=1e-3)
        # the recorded logprobs after the switch are those of the new weights over the whole context
        cut = generation.version_spans[1]["start"]
        rescored = (await client.score([*IDS, *generation.token_ids.tolist()]))[len(IDS) - 1 :]
        assert float(np.abs(rescored - generation.logprobs)[cut + 1 :].max()) < 0.05

        # a bad digest, a path outside, a damaged second shard: nothing moves, and the server goes on
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

        # abort by request id
        long = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=2), "turn-2"))
        await asyncio.sleep(1.0)
        await client.abort(["turn-2"])
        assert (await asyncio.wait_for(long, 10)).finish_reason == "abort"

        # a sync that dies between update and finish: the wrapper loads what is newest and resumes
        second = await record(database, root, 2, files[2])
        async with database.begin() as conn:
            assert await engines.begin_pause(conn, row.id, 1.0)
        await client.pause()
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        row = await wait_for_engine(database, EngineState.READY, 30)
        assert row.version == second == await client.version()
        assert not await client.is_paused()
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-2"), atol=1e-3)

        # kill -9 of the wrapper takes vLLM along; a torn newest version is passed over
        server = int(settings.pidfile.read_text().splitlines()[1].split()[0])
        process.send_signal(signal.SIGKILL)
        process.wait()
        async with asyncio.timeout(20):
            while os.path.exists(f"/proc/{server}") and session_members(server, settings):
                await asyncio.sleep(0.1)
    torn = await record(database, root, 3, [{"name": "model.safetensors", "sha256": "00", "bytes": 0}])
    async with database.begin() as conn:
        await conn.execute(update(Engine).values(state=EngineState.GONE))
    async with wrapper(settings) as process, EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == second != torn
        np.testing.assert_allclose(await client.score(IDS), truth(root / "step-2"), atol=1e-3)

        # `learn.sync` as the workflow calls it: the engine is believed because it answers as the learner does
        monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
        learn = LearnActivities(database, RunConfigs(database, load_temporal_settings()))
        files[4] = publish(root, "step-4", base, 4)
        fourth = await record(database, root, 4, files[4], claimed=root / "step-4")
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=4, engine_id=row.id))
        assert (await wait_for_engine(database, EngineState.READY)).version == fourth
        said = await metrics_of(database, 4)
        print({name: round(value, 5) for name, value in said.items()})
        assert said["canary_gap_max"] < 0.01 and 0 < said["sync_pause_seconds"] < said["sync_seconds"]

        # an update that silently does nothing: all digests are right, the label moves, the weights are those of before
        await record(database, root, 5, files[4], directory="step-4", claimed=root / "step-1")
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=5, engine_id=row.id))
        async with database.begin() as conn:
            assert not await engines.ready_engines(conn), "its wrapper starts it anew, and it may not serve until it answers rightly"
        assert (await metrics_of(database, 5))["canary_gap_mean"] > 10 * said["canary_gap_mean"]
        process.terminate()
        assert process.wait(60) == 0
        assert session_members(server, settings) == []
