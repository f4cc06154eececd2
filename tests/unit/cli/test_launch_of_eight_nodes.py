"""`ratchet launch --check` explains the config of eight nodes: places, memory, rows and bytes a day; nothing starts."""

import json
import re
from pathlib import Path

import pytest

from cli.main import run_app
from training.memory_estimate import engine_gib, learner_gib
from training.model_facts import ModelFacts

LAYERS = 40
TEXT = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": LAYERS,
    "full_attention_interval": 4,
    "layer_types": ["full_attention" if at % 4 == 3 else "linear_attention" for at in range(LAYERS)],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attn_output_gate": True,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
    "max_position_embeddings": 262144,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
}
VISION = {
    "model_type": "qwen3_5_moe",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [],
}
"""The public config.json of Qwen3.6-35B-A3B, as fine-tunes of it repeat it."""
ADDRESSES = [f"10.0.0.{number}" for number in range(2, 9)]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    described = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (model / "config.json").write_text(json.dumps(described | {"text_config": TEXT, "vision_config": VISION}))
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "tokenizer.json").write_text("{}")
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true"}
    (tmp_path / "swe_train.jsonl").write_text(json.dumps({"prompt": "fix", "label": "a", "metadata": metadata}) + "\n")
    values = {"HF_CHECKPOINT": str(model), "PROMPT_DATA": str(tmp_path / "swe_train.jsonl")}
    values |= {"RATCHET_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    values |= {"MASTER_ADDR": "10.0.0.1", "HOSTFILE": str(tmp_path / "hosts")}
    (tmp_path / "hosts").write_text("".join(f"{address} slots=8\n" for address in ["10.0.0.1", *ADDRESSES]))
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_the_model_of_its_public_config_is_the_one_of_its_name(environment: None, tmp_path: Path) -> None:
    """Computed on the meta device. The memory is that of a rank of 64, with a bin as long as the context."""
    facts = ModelFacts.read(tmp_path / "model")
    sizes = facts.sizes
    assert (sizes.architecture, sizes.layers, sizes.chosen) == ("Qwen3_5MoeForConditionalGeneration", LAYERS, 8)
    embeddings = sizes.vocabulary * sizes.hidden
    assert round(sizes.served / 1e9) == 35 and round((sizes.active - embeddings) / 1e9) == 3, "35B-A3B"
    assert sizes.cache_bytes == 10 * 2 * 2 * 256 * 2, "of ten layers: those of linear attention keep a state"
    reasons = [facts.why_no_training(96000), facts.why_no_expert_parallel(8, 64), facts.why_no_sequence_parallel(8)]
    assert [*reasons, sizes.no_segments, sizes.no_replay, sizes.positions] == [None] * 6
    assert learner_gib(sizes, 64, 96000) / 0.55 < 80, "an H100 has 80 GB, of which a rank has 55%"
    divided = learner_gib(sizes, 64, 96000 // 8, expert_parallel=8)  # as the launcher divides bin and experts
    assert divided < learner_gib(sizes, 64, 96000 // 8) < learner_gib(sizes, 64, 96000)
    assert engine_gib(sizes, 8, 96000) / 0.4 < 80


def test_the_config_of_eight_nodes_is_explained(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ratchet", "launch", "--check"])
    code = run_app()
    said = capsys.readouterr()
    print(said.out, said.err)
    assert code == 0
    nodes = re.split(r"^node ", said.out, flags=re.M)[1:]
    assert [node.split()[0] for node in nodes] == ["local", *ADDRESSES]
    for at, node in enumerate(nodes):
        engine = f"engine{'' if at == 0 else f'-{at + 1}'}"
        rows = re.findall(r"^  GPU (\d)   (\S+) +(\d+\.\d) GiB$", node, re.M)
        assert [(gpu, name) for gpu, name, _ in rows] == [
            (str(gpu), part) for gpu in range(8) for part in (engine, "learner")
        ]
        assert all(5 < float(gib) < 80 for *_, gib in rows), "an H100 has 80 GB"
    assert "on this machine: watcher, postgres" in said.out and "boxes: local" in said.out
    assert "of a shared GPU an engine has 40% of the memory, a rank 55%" in said.out
    least = re.search(r"a GPU has at least (\d+) GiB", said.out)
    assert least is not None and int(least[1]) <= 80
    assert re.search(r"a rank sends 2\d\d\.\d GiB of weights and gradients", said.out)
    assert not (tmp_path / "home").exists()
