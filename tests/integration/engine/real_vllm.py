"""Helpers for tests of the real vLLM: a base, published versions, the wrapper's process, and the tokens that it
sampled."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from sqlalchemy import insert

from engine.policy_files import file_sha256
from engine.process import EngineSettings
from ratchet.config_engines import DEFAULT_SET
from ratchet.lora_slots import FIRST_SLOT
from ratchet.types import EngineState, JsonObject, policy_version
from store import engines
from store.database import Database
from store.engines import PublishedPolicy
from store.schema import PolicyVersionTable, RunTable
from tests.cpu_vllm import cpu_settings
from tests.standins.tiny_model import make_tokenizer, make_weights
from tests.unit.training.cuts import make_plan, make_rollouts

if TYPE_CHECKING:
    from training.learner import RankLearner

IDS = list(range(10, 60))
PATIENCE_SECONDS = 600.0


def never_stop(model: Path) -> None:
    """Remove every end token."""
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        values = json.loads((model / name).read_text())
        for key in ("eos_token", "eos_token_id"):
            values.pop(key, None)
        (model / name).write_text(json.dumps(values))


def make_endless_base(directory: Path) -> Path:
    """Make a tiny model whose calls last until their token limit."""
    make_tokenizer(directory)
    make_weights(directory)
    never_stop(directory)
    return directory


def wrapper_settings(base: Path, home: Path, root: Path, postgres_url: str, **values: Any) -> EngineSettings:
    """Return the settings of an engine that serves versions below `root`, with room for long calls."""
    room = {"max_model_len": 4096, "max_num_seqs": 16}
    return cpu_settings(base, home, database_url=postgres_url, policies_root=root, **room, **values)


def metrics_client(settings: EngineSettings) -> httpx.AsyncClient:
    """Return a client for `wait_for_tokens`."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=settings.address, trust_env=False, limits=limits, timeout=60)


async def add_run(database: Database, run_id: str = "run-1", slot: int = FIRST_SLOT) -> None:
    async with database.begin() as conn:
        values = {
            "run_id": run_id,
            "lora_slot": slot,
            "config": {"datasets": [{"path": "unused.jsonl"}]},
            "config_digest": "",
            "config_name": "",
            "seed": 0,
            "model_path": "",
        }
        await conn.execute(insert(RunTable).values(**values))


def publish(root: Path, name: str, source: Path, seed: int) -> list[JsonObject]:
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
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()  # type: ignore[no-any-return]


def train(learner: "RankLearner", num_steps: int, least_gap: float) -> tuple[JsonObject, JsonObject]:
    """Train on the same rollouts in every call. Return the canary before and after, which differ by more than
    `least_gap` on average; the canary takes 0.1 for rounding.
    """
    before = learner.canary()
    rollouts = make_rollouts(6)
    chains = [chain for one in rollouts for chain in one.chains([True])]
    for _ in range(num_steps):
        learner.step(make_plan(rollouts, "token_mean"), chains)
    after = learner.canary()
    gaps = [abs(one - other) for one, other in zip(before["logprobs"], after["logprobs"], strict=True)]
    assert np.mean(gaps) > least_gap, "training has changed little more than the canary takes for rounding"
    return before, after


async def record(
    database: Database,
    step: int,
    directory: Path,
    files: list[JsonObject],
    scores: Sequence[float] | None = None,
    run_id: str = "run-1",
) -> PublishedPolicy:
    """Insert a published version. `scores`: those of IDS[1:] in its canary; None: it has no canary."""
    version = policy_version(run_id, step, 1)
    canary = None if scores is None else {"ids": IDS, "logprobs": list(scores)}
    row = {"version": version, "run_id": run_id, "step": step, "epoch": 1, "uri": str(directory), "files": files}
    async with database.begin() as connection:
        await connection.execute(insert(PolicyVersionTable).values(**row, canary=canary))
    return PublishedPolicy(version, str(directory), files, canary)


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


async def wait_for_engine(database: Database, state: EngineState, timeout_seconds: float = 1500) -> engines.EngineRow:
    async with asyncio.timeout(timeout_seconds):
        while True:
            async with database.begin() as conn:
                found = [row for row in await engines.list_engines(conn, DEFAULT_SET) if row.state is state]
            if found:
                return found[0]
            await asyncio.sleep(0.2)


async def wait_for_tokens(engine: httpx.AsyncClient, more_than: float = 0.0) -> float:
    """Wait until the server has sampled more than so many tokens, by its own count; return the count."""
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
