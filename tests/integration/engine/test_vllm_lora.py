"""The real vLLM with LoRA: start, adapters in place, a call in flight, another base, refusals, a restart.

`make slow` runs it, in two minutes on idle cores, since vLLM starts twice.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from sqlalchemy import func, update

from engine import policy_files
from engine.client import EngineClient
from engine.generate_request import Sampling
from engine.policy_files import weight_files
from engine.weight_update import load_from_files, replace_weights, score_canary
from ratchet.errors import EngineUnavailableError
from ratchet.types import EngineState, JsonObject
from store import engines
from store.database import Database
from store.engines import PublishedPolicy
from store.schema import EngineTable
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
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*"),
]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def publish_adapter(base: Path, directory: Path, seed: int, rank: int = 8) -> list[JsonObject]:
    """Publish adapters with random values, whose effect is far above the noise between two kernels."""
    from transformers import AutoModelForCausalLM

    from ratchet.config import LoraConfig
    from training import lora

    settings = LoraConfig(rank=rank, alpha=2 * rank, target_modules=TARGETS)
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora.add_adapters(network, settings)
    torch.manual_seed(seed)
    parameters = {f"model.{name}": one for name, one in network.named_parameters()}  # as in TrainablePolicy
    state = {name: 0.1 * torch.randn_like(tensor) for name, tensor in lora.adapter_tensors(parameters)}
    files = weight_files(policy_files.describe_files(base))
    return policy_files.publish_adapter(state, lora.peft_config(settings, base), base, files, directory)


def merged_scores(adapter: Path, base: Path) -> list[float]:
    """Return the logprobs of IDS[1:] by PEFT's merged model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    with torch.no_grad():
        logprobs = network.merge_and_unload()(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()
    return found


Adapter = tuple[list[JsonObject], list[float]]
"""Files of a published adapter, and the scores of IDS with it."""


async def test_adapters_move_with_their_label(database: Database, postgres_url: str, tmp_path: Path) -> None:
    base, root = make_endless_base(tmp_path / "base"), tmp_path / "policies"
    await add_run(database)
    publish(root, "0.e1", base, 0)
    zero = root / "0.e1"
    first = await record(database, 0, zero, policy_files.describe_files(zero), truth(zero).tolist())
    versions: dict[int, Adapter] = {}
    for step in (1, 2, 3):
        directory = root / f"{step}.e1"
        files = publish_adapter(zero, directory, step)
        versions[step] = (files, merged_scores(directory, zero))
    settings = wrapper_settings(base, tmp_path, root, postgres_url, lora_rank=8)
    server = metrics_client(settings)
    async with wrapper(settings), EngineClient(settings.address) as client, server:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == first.version == await client.version()
        np.testing.assert_allclose(await client.score(IDS), truth(zero), atol=1e-3)
        one, two = await update_in_flight(database, client, server, root, first, versions)
        await refuse_what_cannot_be_served(client, root, zero, two, versions[3][0])
        await bring_another_base(client, root, base, versions[1])

        # a sync that dies before it labels the weights: the wrapper loads the newest version
        three = await record(database, 3, root / "3.e1", *versions[3])
        async with database.begin() as connection:
            assert await engines.begin_engine_pause(connection, row.id, PATIENCE_SECONDS)
        await client.pause()
        await client.start_update()
        await load_from_files(one, root)(client)
        async with database.begin() as connection:
            await connection.execute(
                update(EngineTable).where(EngineTable.id == row.id).values(paused_until=func.now())
            )
        row = await wait_for_engine(database, EngineState.READY, PATIENCE_SECONDS)
        assert row.version == three.version == await client.version()
        np.testing.assert_allclose(await client.score(IDS), versions[3][1], atol=1e-3)

    # an engine that starts late begins with the base of the newest version and then loads its adapter
    async with database.begin() as connection:
        await connection.execute(update(EngineTable).values(state=EngineState.GONE))
    async with wrapper(settings), EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == three.version == await client.version()
        np.testing.assert_allclose(await client.score(IDS), versions[3][1], atol=1e-3)
    assert settings.adapter is not None and not settings.adapter.exists()
    with contextlib.suppress(FileNotFoundError):
        assert "quarantined" not in (tmp_path / "engine.log").read_text()


async def update_in_flight(
    database: Database,
    client: EngineClient,
    server: httpx.AsyncClient,
    root: Path,
    first: PublishedPolicy,
    versions: dict[int, Adapter],
) -> tuple[PublishedPolicy, PublishedPolicy]:
    """A call in flight goes on with each adapter, and its tokens carry the label of the weights that sampled them."""
    scored = await wait_for_tokens(server)
    call = asyncio.create_task(client.generate(IDS, Sampling(3000, 1.0, seed=1), "turn-1", first.version))
    await wait_for_tokens(server, scored)
    one = await record(database, 1, root / "1.e1", *versions[1])
    await replace(client, one, root, "first_adapter_seconds")
    sampled = await wait_for_tokens(server)
    await wait_for_tokens(server, sampled)
    two = await record(database, 2, root / "2.e1", *versions[2])
    await replace(client, two, root, "adapter_seconds")
    generation = await call
    labels = [span["version"] for span in generation.version_spans]
    assert labels == [first.version, one.version, two.version] and generation.logprobs_valid
    assert one.canary is not None and two.canary is not None
    found = await score_canary(client, two.canary, one.canary)
    print({"canary_gap_mean": found.mean_gap, "canary_gap_max": found.max_gap})
    assert found.reason is None and found.max_gap < 1e-2
    assert (await score_canary(client, one.canary)).reason is not None, "the adapters differ by more than noise"
    cut = generation.version_spans[2]["start"]
    rescored = (await client.score([*IDS, *generation.token_ids.tolist()]))[len(IDS) - 1 :]
    assert float(np.abs(rescored - generation.logprobs)[cut + 1 :].max()) < 0.05
    return one, two


async def refuse_what_cannot_be_served(
    client: EngineClient, root: Path, base: Path, served: PublishedPolicy, files: list[JsonObject]
) -> None:
    """An adapter that the engine cannot serve, and one of `files` that is damaged, change nothing."""
    wide = publish_adapter(base, root / "wide", 7, rank=16)
    damaged = [file | {"sha256": "00" * 32} for file in files]
    for directory, described, sentence in (
        (root / "wide", wide, "has rank 16 and this engine serves at most 8"),
        (root / "3.e1", damaged, "no weight was changed"),
    ):
        refused = PublishedPolicy("run-1/9.e1", str(directory), described, None)
        with pytest.raises(EngineUnavailableError, match=sentence):
            await replace_weights(client, refused.version, load_from_files(refused, root))
        await client.resume()
        assert await client.version() == served.version
        assert served.canary is not None and (await score_canary(client, served.canary)).reason is None


async def bring_another_base(client: EngineClient, root: Path, base: Path, first: Adapter) -> None:
    """An adapter of another base brings its base with it, and back; whole weights are served without adapter."""
    other = root / "other"
    publish(root, "other", base, 5)
    four = publish_adapter(other, root / "4.e1", 4)
    for directory, files, expected in (
        (root / "4.e1", four, merged_scores(root / "4.e1", other)),
        (root / "1.e1", *first),
        (other, policy_files.describe_files(other), truth(other).tolist()),
    ):
        await replace(client, PublishedPolicy("run-1/8.e1", str(directory), files, None), root, "with_base_seconds")
        np.testing.assert_allclose(await client.score(IDS), expected, atol=1e-3)


async def replace(client: EngineClient, policy: PublishedPolicy, root: Path, figure: str) -> None:
    started = time.monotonic()
    await replace_weights(client, policy.version, load_from_files(policy, root))
    print({figure: round(time.monotonic() - started, 3)})
