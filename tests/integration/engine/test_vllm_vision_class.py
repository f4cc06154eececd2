"""The real vLLM serves published versions of a class with a vision tower and experts, and agrees with the learner.

vLLM's CPU kernels of Gated DeltaNet need bfloat16 and heads of 128, so learner and engine agree up to rounding only.
Experts of 48 are padded for vLLM's CPU kernel, and all are packed for it. `make slow` runs it, in two minutes on idle
cores.
"""

from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.weight_update import load_from_files, replace_weights, score_canary
from ratchet.types import EngineState
from store.database import Database
from store.engines import PublishedPolicy
from tests.integration.engine.real_vllm import add_run, record, train, wait_for_engine, wrapper, wrapper_settings
from tests.standins.tiny_model import make_tokenizer
from tests.standins.wrapped_model import make_wrapped_model
from tests.unit.training.cuts import make_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("single_rank")]

SIZES = {
    "vocab_size": 640,
    "max_position_embeddings": 4096,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 64,
}


async def test_an_engine_agrees_with_the_learner_after_training(
    database: Database, postgres_url: str, tmp_path: Path
) -> None:
    from training.learner import RankLearner

    root = tmp_path / "policies"
    base = make_wrapped_model("Qwen3_5MoeForConditionalGeneration", tmp_path / "base", "bfloat16", **SIZES)
    make_tokenizer(base)
    learner = RankLearner(base, make_config(learning_rate=3e-2))
    before, after = train(learner, num_steps=3, least_gap=0.3)
    files = learner.publish(root / "1.e1")

    await add_run(database)
    version = await record(database, 1, root / "1.e1", files)
    text_only = ("--enforce-eager", "--language-model-only")
    settings = wrapper_settings(base, tmp_path, root, postgres_url, dtype="bfloat16", args=text_only)
    async with wrapper(settings), EngineClient(settings.address) as client:
        row = await wait_for_engine(database, EngineState.READY)
        assert row.version == version.version == await client.version()
        found = await score_canary(client, after, before)
        print({"canary_gap_mean": found.mean_gap, "canary_gap_max": found.max_gap})
        assert found.reason is None
        assert (await score_canary(client, before)).reason is not None

        for step in (2, 3):  # in the running engine, whose experts are packed and padded once more each time
            before, after = train(learner, num_steps=3, least_gap=0)
            files = learner.publish(root / f"{step}.e1")
            policy = PublishedPolicy(f"run-1/{step}.e1", str(root / f"{step}.e1"), files, None)
            await replace_weights(client, policy.version, load_from_files(policy, root))
            found = await score_canary(client, after, before)
            print({"step": step, "canary_gap_mean": found.mean_gap, "canary_gap_max": found.max_gap})
            assert found.reason is None
        assert (await score_canary(client, before)).reason is not None
