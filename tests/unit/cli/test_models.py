"""`ratchet models check` finds what fits a model by trying it, and names what does not."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from adapter.prompt.parser_choice import FittingParser, fitting_parsers
from adapter.prompt.renderer import Renderer
from cli.models.check import _parsers, _training
from ratchet.config import LoraConfig
from ratchet.errors import ConfigError
from tests.standins.wrapped_model import EXPERTS, TEXT, make_wrapped_model
from tests.unit.training.test_gradients import MOE, TINY, make_architecture
from training.memory_estimate import engine_gib, learner_gib
from training.model_facts import ModelFacts

pytestmark = pytest.mark.filterwarnings(  # of vLLM's import
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)


def test_the_parsers_that_read_what_the_template_writes(model: Path) -> None:
    """The tiny model writes calls as Qwen3-Coder does, and its answers without thinking have no mark of it."""
    found = fitting_parsers(Renderer(model))
    assert found.tools is not None and found.thinking is not None
    assert FittingParser("qwen3_coder", complete=True) in found.tools
    assert not {"hermes", "mistral", "llama3_json", "deepseek_v3"} & {parser.name for parser in found.tools}
    assert FittingParser("qwen3", complete=False) in found.thinking
    assert not {"mistral", "openai_gptoss"} & {parser.name for parser in found.thinking}


def test_a_template_without_tools_or_thinking_has_no_parsers(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    more = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(plain + more)
    renderer = Renderer(tmp_path)
    assert fitting_parsers(renderer) == (None, None)
    tools = _parsers(renderer)[0]
    assert tools.is_problem and "put one that does into chat_template.jinja, such as Qwen2.5's, which" in tools.text
    related = resources.files("trl") / "chat_templates" / "qwen2_5.jinja"
    (tmp_path / "chat_template.jinja").write_text(related.read_text())
    assert "hermes" in _parsers(Renderer(tmp_path))[0].text and "engine.tool_parser: hermes" in tools.text


def test_memory_and_training_are_read_from_the_config(tmp_path: Path) -> None:
    """By hand for the master weights: 16 bytes per weight, shared by all ranks."""
    model = make_architecture("Qwen3MoeForCausalLM", tmp_path, **MOE)
    facts = ModelFacts.read(model)
    sizes = facts.sizes
    assert sizes.architecture == "Qwen3MoeForCausalLM" and sizes.active < sizes.weights
    assert sizes.no_segments is None and not sizes.has_vision
    saved = (learner_gib(sizes, 1, 4096) - learner_gib(sizes, 2, 4096)) * 2**30
    assert saved == pytest.approx(16 * sizes.weights / 2)
    adapter_weights = facts.adapter_weights(LoraConfig(rank=4, target_modules=["q_proj"]))
    queries = TINY["num_attention_heads"] * TINY["head_dim"]
    assert adapter_weights == TINY["num_hidden_layers"] * 4 * (TINY["hidden_size"] + queries)
    adapted = [learner_gib(sizes, ranks, 4096, adapter_weights=adapter_weights) for ranks in (1, 2)]
    saved = (adapted[0] - adapted[1]) * 2**30
    assert saved == pytest.approx((2 * sizes.weights + 16 * adapter_weights) / 2)
    divided = (learner_gib(sizes, 4, 4096, expert_parallel=2) - learner_gib(sizes, 4, 4096)) * 2**30
    weights_of_experts = 4 * 3 * TINY["hidden_size"] * 16
    assert sizes.layer_experts == weights_of_experts
    assert divided == pytest.approx(4 * (4096 * 2 * TINY["hidden_size"] - weights_of_experts / 2))
    assert sizes.cache_bytes == 2 * 2 * 2 * 2 * 8
    assert sizes.expert_bytes == TINY["num_hidden_layers"] * 2 and sizes.no_replay is None
    found = {one.name: one.text for one in _training(model, 4096)}
    assert found["routing"] == "training.router_replay: true can be used; 4 bytes per token until a turn is trained"
    assert engine_gib(sizes, 1, 1000) * 2**30 == pytest.approx(2 * sizes.weights + 1000 * sizes.cache_bytes)
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    (problem,) = _training(tmp_path, 4096)
    assert problem.is_problem and "no causal language model" in problem.text


def test_a_context_below_the_default_is_named(tmp_path: Path) -> None:
    for known, wanted in (
        (8192, "sampling.max_context_tokens: at most 8,192 for this model, not 32,768"),
        (65536, None),
    ):
        path = make_architecture("LlamaForCausalLM", tmp_path / str(known), max_position_embeddings=known)
        found = {one.name: one for one in _training(path, 4096)}
        assert (found["context"].text if wanted else found.get("context")) == wanted


def test_how_long_chains_can_be_is_said_if_positions_depend_on_others(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 48}
    dynamic = make_architecture("LlamaForCausalLM", tmp_path, rope_parameters=rope)
    found = {one.name: one for one in _training(dynamic, 4096)}
    assert found["positions"].text.startswith("sampling.max_context_tokens: at most 48 in training, since rotary")
    assert not found["positions"].is_problem, "it can be trained"
    plain = make_architecture("Qwen3ForCausalLM", tmp_path)
    assert "positions" not in {one.name for one in _training(plain, 4096)}


def test_of_a_class_with_a_vision_tower_the_text_layers_are_trained(tmp_path: Path) -> None:
    """The learner's memory is that of the text model alone, the engine's that of the whole class."""
    name = "Qwen3_5MoeForConditionalGeneration"
    sizes = ModelFacts.read(make_wrapped_model(name, tmp_path / "wrapped")).sizes
    text = ModelFacts.read(make_architecture("Qwen3_5MoeForCausalLM", tmp_path, **TEXT, **EXPERTS)).sizes
    assert sizes.architecture == name and sizes.has_vision and not text.has_vision
    assert sizes.weights == text.weights == text.served < sizes.served
    assert sizes.no_segments is None and learner_gib(sizes, 1, 4096) == learner_gib(text, 1, 4096)
    assert engine_gib(sizes, 1, 1000) - engine_gib(text, 1, 1000) == pytest.approx(
        2 * (sizes.served - sizes.weights) / 2**30
    )
    found = {one.name: one.text for one in _training(tmp_path / "wrapped", 4096)}
    assert "images are named in the prompt, not shown" in found["model"]
    assert "trained: the text layers" in found["training"] and "training.packing: tree" in found["training"]
    plain = {one.name: one.text for one in _training(tmp_path / "Qwen3_5MoeForCausalLM", 4096)}
    assert "trained:" not in plain["training"] and "images" not in plain["model"]


def test_the_size_and_replay_of_experts_are_named(tmp_path: Path) -> None:
    """More than 256 experts need two bytes; a model without any has no line."""
    many = make_architecture("Qwen3MoeForCausalLM", tmp_path, **MOE | {"num_experts": 300})
    assert ModelFacts.read(many).sizes.expert_bytes == TINY["num_hidden_layers"] * 2 * 2
    dense = make_architecture("Qwen3ForCausalLM", tmp_path)
    assert "routing" not in {one.name for one in _training(dense, 4096)}
    other = {one.name: one.text for one in _training(make_architecture("MixtralForCausalLM", tmp_path), 4096)}
    assert "MixtralForCausalLM is not registered for router replay" in other["routing"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (fp8)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "its weights are quantised (mxfp4)"),
        ({"num_attention_heads": 0}, "a model of this form cannot be trained here"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "nope"}}, "nope"),
        ({"quantization_config": "fp8"}, "AttributeError"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}, "needs code of its own (auto_map)"),
    ],
)
def test_a_config_that_cannot_be_trained_is_a_problem(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    """Also if transformers computes with the fields before it looks at them."""
    path = make_architecture("Qwen3ForCausalLM", tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    (found,) = [one for one in _training(path, 4096) if one.name == "training"]
    assert found.is_problem and says in found.text
    if "quantised" in says:
        assert says in str(ModelFacts.read(path).why_no_training(100))


def test_a_model_without_a_package_is_named(tmp_path: Path) -> None:
    from cli.models.make import get

    with pytest.raises(ConfigError, match="no package of the model 'gpt-9'; it is one of smollm2-135m"):
        get("gpt-9", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--dtype: 'int4' is not one of bfloat16, float32"):
        get("smollm2-135m", tmp_path / "model", "int4")
    assert not any(tmp_path.iterdir())
