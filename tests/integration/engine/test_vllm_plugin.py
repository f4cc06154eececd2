"""The real vLLM under its wrapper: start, in-flight update, refused update, lapsed pause, kill -9.

Only the real server shows that weights, labels and caches change together. `make slow` runs it, in two minutes on idle
cores, since vLLM starts twice.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from sqlalchemy import func, insert, select, update
from temporalio.testing import ActivityEnvironment

from activities.learning import LearnActivities
from activities.run_configs import RunConfigs
from engine.client import EngineClient, Sampling
from engine.policy_files import file_sha256
from engine.process import EngineSettings, session_members
from ratchet.errors import EngineUnavailableError
from ratchet.payloads import SyncInput
from ratchet.store import engines
from ratchet.store.database import Database
from ratchet.store.schema import EngineTable, MetricTable, PolicyVersionTable, RunTable
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState, policy_version
from stack.ports import free_port
from tests.standins.tiny_model import make_tokenizer, make_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # vLLM starts twice: a minute each on idle cores, ten on busy ones
IDS = list(range(10, 60))
PATIENCE_SECONDS = 600.0


def publish(root: Path, name: str, source: Path, seed: int) -> list[dict[str, object]]:
    import torch

    directory = root / name
    directory.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(seed)
    weights = {
        key: (value + 0.02 * torch.randn_like(value)).contiguous()
        for key, value in load_file(source / "model.safetensors").items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return [{"name": "model.safetensors", "sha256": file_sha256(directory / "model.safetensors"), "bytes": 0}]


def truth(model: Path) -> np.ndarray:
    """Return the logprobs of IDS[1:] by transformers, from the files."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()  # type: ignore[no-any-return]


async def record(
    database: Database,
    root: Path,
    step: int,
    files: list[dict[str, object]],
    directory: str = "",
    claimed: Path | None = None,
) -> str:
    """Insert a published version. `claimed`: the weights that its canary is taken from."""
    version = policy_version("run-1", step, 1)
    uri = str(root / (directory or f"step-{step}"))
    canary = None if claimed is None else {"ids": IDS, "logprobs": truth(claimed).tolist()}
    async with database.begin() as conn:
        values = {
            "version": version,
            "run_id": "run-1",
            "step": step,
            "epoch": 1,
            "uri": uri,
            "files": files,
            "canary": canary,
        }
        await conn.execute(insert(PolicyVersionTable).values(**values))
    return version


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


async def wait_for_engine(database: Database, state: EngineState, timeout_seconds: float = 1500) -> engines.EngineRow:
    async with asyncio.timeout(timeout_seconds):
        while True:
            async with database.begin() as conn:
                found = [row for row in await engines.list_engines(conn) if row.state is state]
            if found:
                return found[0]
            await asyncio.sleep(0.2)


async def wait_for_tokens(engine: httpx.AsyncClient, more_than: float = 0.0) -> float:
    """Wait until the server has sampled more tokens than `before`, by its own count; return the count."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            text = (await engine.get("/metrics")).text
            families = text_string_to_metric_families(text)
            found = sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == "vllm:generation_tokens_total"
            )
            if found > more_than:
                return found
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def wrapper(settings: EngineSettings) -> AsyncIterator[subprocess.Popen[bytes]]:
    program = (
        "import asyncio, sys; from engine.wrapper import run_engine; from engine.process import EngineSettings; "
        "asyncio.run(run_engine(EngineSettings.model_validate_json(sys.argv[1])))"
    )
    log = (settings.state_dir / "engine.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-c", program, settings.model_dump_json()], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            await asyncio.to_thread(process.wait, PATIENCE_SECONDS)
        log.close()


def server_pid(settings: EngineSettings) -> int:
    return int(settings.pidfile.read_text().splitlines()[1].split()[0])


def never_stop(model: Path) -> None:
    """Remove every end token, so that a call lasts until its token limit."""
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
        await conn.execute(insert(RunTable).values(**values))


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
    server = httpx.AsyncClient(
        base_url=settings.address, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
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

        # in no NCCL group, but with its root: tensors by name are refused, files are read
        await client.init_weight_transfer()
        await client.start_update()
        with pytest.raises(EngineUnavailableError, match="in no NCCL group"):
            await client.receive(["lm_head.weight"], ["float32"], [[1]])
        await client.start_update()
        await client.update(["step-1/model.safetensors"], [str(files[1][0]["sha256"])])
        await client.finish_update(None)
        np.testing.assert_allclose(await client.score(IDS), after, atol=1e-5)
        assert await client.num_workers() == 1

        # abort by request id
        before = await wait_for_tokens(server)
        long = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=2), "turn-2"))
        await wait_for_tokens(server, before)
        await client.abort(["turn-2"])
        aborted = await asyncio.wait_for(long, PATIENCE_SECONDS)
        assert aborted.finish_reason == "abort" and len(aborted.token_ids) < 3000

        # a sync that dies between update and finish: the wrapper loads the newest version and resumes
        second = await record(database, root, 2, files[2])
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
    torn = await record(database, root, 3, [{"name": "model.safetensors", "sha256": "00", "bytes": 0}])
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
        fourth = await record(database, root, 4, files[4], claimed=root / "step-4")
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=4, engine_id=row.id))
        assert (await wait_for_engine(database, EngineState.READY)).version == fourth
        said = await metrics_of(database, 4)
        print({name: round(value, 5) for name, value in said.items()})
        assert said["canary_gap_max"] < 0.01
        assert 0 < said["sync_pause_seconds"] < said["sync_first_token_seconds"] < said["sync_seconds"]

        # an update that silently does nothing: digests are right, the label changes, the weights do not
        await record(database, root, 5, files[4], directory="step-4", claimed=root / "step-1")
        await ActivityEnvironment().run(learn.sync, SyncInput(run_id="run-1", step=5, engine_id=row.id))
        async with database.begin() as conn:
            assert not await engines.ready_engines(conn), "it may not serve until its canary passes"
        assert (await metrics_of(database, 5))["canary_gap_mean"] > 10 * said["canary_gap_mean"]
        assert await asyncio.to_thread(process.wait, PATIENCE_SECONDS) != 0, (
            "its wrapper ends, and the supervisor starts both again"
        )
        assert "quarantined (it" in (tmp_path / "engine.log").read_text(), "the log has the reason"
        assert session_members(vllm, settings) == []
