"""Every variable and argument of vime has an effect, and none is ignored."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activities.harnesses.agent_programs import claude_code_program
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError
from ratchet.temporal_settings import load_temporal_settings
from ratchet.vime_names import REFUSED, VIME_ARGUMENTS, VIME_VARIABLES, dump_pattern, value_of
from sandboxes.e2b import image_metadata_key
from sandboxes.registry import adapter_url, sandbox_provider
from stack.follow_run import new_run_id, run_name
from stack.parts import Stack


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name in ("tasks.jsonl", "others.jsonl", "heldout.jsonl"):
        (tmp_path / name).write_text("{}")
    found = tmp_path / "run.yaml"
    found.write_text(
        "datasets: [{path: tasks.jsonl, limit: 3}, {path: heldout.jsonl, use: eval}]\n"
        "engine: {args: [--enforce-eager]}\n"
        "training: {bin_tokens: 100000}\n"
    )
    return found


def train(config: RunConfig) -> Any:
    return config.datasets[0]


Read = Callable[[RunConfig], Any]
KEYS: dict[str, tuple[str, Read, Any]] = {
    "HF_CHECKPOINT": ("/models/qwen", lambda c: c.model, "/models/qwen"),
    "REF_MODEL_PATH": ("/models/ref", lambda c: c.loss.reference_model, "/models/ref"),
    "PROMPT_DATA": (
        "others.jsonl",
        lambda c: [Path(one.path).name for one in c.datasets],
        ["others.jsonl", "heldout.jsonl"],
    ),
    "SWE_AGENT_TIME_BUDGET_SEC": ("12", lambda c: c.limits.agent_seconds, 12),
    "SWE_EVAL_TIMEOUT_SEC": ("13", lambda c: c.limits.eval_seconds, 13),
    "SWE_ROLLOUT_GUARD_SEC": ("14", lambda c: c.limits.guard_seconds, 14),
    "SWE_CC_PROMPT": ("Fix: {problem_statement}", lambda c: c.harness.prompt, "Fix: {problem_statement}"),
    "VIME_AGENT_CC_EXTRA_ARGS": ("--debug: x", lambda c: c.harness.extra_args, "--debug: x"),
    "VIME_AGENT_CC_EXTRA_ENVS": (json.dumps({"A": "1"}), lambda c: c.harness.extra_env, {"A": "${A}"}),
    "VLLM_ARGS": (
        "--vllm-tool-call-parser hermes --vllm-gpu-memory-utilization 0.8",
        lambda c: (c.engine.tool_parser, c.engine.args),
        ("hermes", ["--enforce-eager", "--gpu-memory-utilization", "0.8"]),
    ),
    "--hf-checkpoint": ("/models/qwen", lambda c: c.model, "/models/qwen"),
    "--ref-load": ("/models/ref", lambda c: c.loss.reference_model, "/models/ref"),
    "--prompt-data": ("others.jsonl", lambda c: (Path(train(c).path).name, train(c).limit), ("others.jsonl", 3)),
    "--input-key": ("issue", lambda c: [one.input_key for one in c.datasets], ["issue", "prompt"]),
    "--label-key": ("id", lambda c: train(c).label_key, "id"),
    "--metadata-key": ("meta", lambda c: train(c).metadata_key, "meta"),
    "--num-rollout": ("7", lambda c: c.training.steps, 7),
    "--rollout-batch-size": ("9", lambda c: c.training.groups_per_step, 9),
    "--n-samples-per-prompt": ("4", lambda c: c.training.group_size, 4),
    "--num-steps-per-rollout": ("2", lambda c: c.training.updates_per_step, 2),
    "--rollout-max-context-len": ("96000", lambda c: c.sampling.max_context_tokens, 96000),
    "--rollout-max-response-len": ("321", lambda c: c.sampling.max_response_tokens, 321),
    "--rollout-temperature": ("0.7", lambda c: c.sampling.temperature, 0.7),
    "--rollout-stop-token-ids": ("248046 248044", lambda c: c.engine.stop_token_ids, [248046, 248044]),
    "--custom-generate-function-path": ("mine.rl.make", lambda c: c.harness.generate, "mine.rl:make"),
    "--vllm-tool-call-parser": ("hermes", lambda c: c.engine.tool_parser, "hermes"),
    "--vllm-reasoning-parser": ("qwen3", lambda c: c.engine.reasoning_parser, "qwen3"),
    "--lr": ("3e-6", lambda c: c.training.learning_rate, 3e-6),
    "--weight-decay": ("0.1", lambda c: c.training.weight_decay, 0.1),
    "--eps-clip": ("0.1", lambda c: c.loss.clip_low, 0.1),
    "--eps-clip-high": ("0.3", lambda c: c.loss.clip_high, 0.3),
    "--entropy-coef": ("0.01", lambda c: c.loss.entropy_bonus, 0.01),
    "--kl-loss-coef": ("0.02", lambda c: c.loss.reference_kl, 0.02),
}
"""Name → (value, what to read, what must be read)."""


PARTS: dict[str, tuple[str, Callable[[], Any], Any]] = {
    "E2B_API_KEY": ("e2b_" + "1" * 40, lambda: vars(sandbox_provider())["_options"]["api_key"], "e2b_" + "1" * 40),
    "VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": ("our/image", image_metadata_key, "our/image"),
    "SWE_BOOT_CONCURRENCY": ("6", lambda: load_temporal_settings().queues["boot"].slots, 6),
    "EXP_TAG": ("tagged", lambda: run_name(Path("run.yaml")), "tagged"),
    "STAMP": ("20261125", lambda: new_run_id("run").rpartition("-")[0], "run-20261125"),
}
"""Variables that a part reads: name → (value, what the part makes of it, what it must be)."""
ELSEWHERE = {"VIME_AGENT_NODE_TARBALL", "VIME_AGENT_CC_TARBALL", "HOSTFILE"}
"""Variables with tests of their own: test_agent_programs.py in tests/unit/activities/harnesses, test_launch.py in
tests/unit/cli."""
ADAPTER = {"ADAPTER_PUBLIC_HOST", "MASTER_ADDR", "ADAPTER_BIND_HOST", "ADAPTER_PORT"}


def test_every_name_is_tested() -> None:
    assert {one.name for one in (*VIME_VARIABLES, *VIME_ARGUMENTS)} == {*KEYS, *PARTS, *ELSEWHERE, *ADAPTER}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_name_sets_its_key(name: str, path: Path) -> None:
    value, read, expected = KEYS[name]
    overrides = ["harness.name=claude_code"]
    if name in ("REF_MODEL_PATH", "--ref-load"):  # read only then
        overrides.append("loss.reference_kl=0.1")
    before = read(load_config(path, overrides, {}))
    if name.startswith("--"):
        found = load_config(path, overrides, {}, [name, *value.split(" ")])
    else:
        found = load_config(path, overrides, {name: value})
    assert before != expected
    assert read(found) == expected


def test_further_arguments_reach_vllm_as_they_are(path: Path) -> None:
    config = load_config(path, [], {}, ["--vllm-max-num-seqs", "64", "--vllm-enforce-eager", "--vllm-x=true"])
    assert config.engine.args == ["--enforce-eager", "--max-num-seqs", "64", "--enforce-eager", "--x", "true"]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_reads_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, read, expected = PARTS[name]
    monkeypatch.delenv(name, raising=False)
    assert read() != expected
    monkeypatch.setenv(name, value)
    assert read() == expected


@pytest.mark.parametrize(
    ("variables", "url", "bound"),
    [
        ({}, "http://127.0.0.1:{port}", "127.0.0.1"),
        ({"MASTER_ADDR": "10.0.0.1"}, "http://10.0.0.1:{port}", "0.0.0.0"),
        ({"MASTER_ADDR": "10.0.0.1", "ADAPTER_PUBLIC_HOST": "10.9.9.9"}, "http://10.9.9.9:{port}", "0.0.0.0"),
        ({"ADAPTER_PUBLIC_HOST": "10.9.9.9", "ADAPTER_BIND_HOST": "10.0.0.1"}, "http://10.9.9.9:{port}", "10.0.0.1"),
        ({"ADAPTER_PORT": "19001"}, "http://127.0.0.1:19001", "127.0.0.1"),
    ],
)
def test_addresses_of_the_adapter(
    variables: dict[str, str], url: str, bound: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ADAPTER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)  # boxes of a service, not of the stack's own gateway
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stack = Stack(tmp_path)
    for name, value in stack.environment().items():
        monkeypatch.setenv(name, value)
    assert adapter_url() == url.format(port=stack.ports["adapter"])
    assert os.environ["ADAPTER_BIND_HOST"] == bound


@pytest.mark.parametrize("name", ["ADAPTER_PUBLIC_HOST", "MASTER_ADDR"])
def test_boxes_of_the_own_gateway_call_their_loopback(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have no other network; the gateway forwards the adapter's port to them."""
    for variable in (*ADAPTER, "E2B_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "10.0.0.1")
    assert Stack(tmp_path).environment()["ADAPTER_PUBLIC_HOST"] == "127.0.0.1"


@pytest.mark.parametrize("prefix", ["SWE_", "SLIME_AGENT_"])
def test_older_names_are_read(prefix: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["harness.name=claude_code"]
    assert load_config(path, overrides, {f"{prefix}CC_EXTRA_ARGS": "--x"}).harness.extra_args == "--x"
    assert load_config(path, overrides, {f"{prefix}CC_EXTRA_ENVS": '{"A": "1"}'}).harness.extra_env == {"A": "${A}"}
    with pytest.raises(ConfigError, match=r"nowhere\.tgz is not a file"):
        claude_code_program({f"{prefix}CC_TARBALL": str(tmp_path / "nowhere.tgz")})
    tarballs = {f"{prefix}CC_TARBALL": str(path), f"{prefix}NODE_TARBALL": str(tmp_path / "nowhere.tar.xz")}
    with pytest.raises(ConfigError, match=r"nowhere\.tar\.xz is not a file"):
        claude_code_program(tarballs)
    monkeypatch.delenv("VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", raising=False)
    monkeypatch.setenv(f"{prefix}SANDBOX_IMAGE_METADATA_KEY", "our/image")
    assert image_metadata_key() == "our/image"
    assert (
        value_of("VIME_AGENT_CC_EXTRA_ARGS", {"VIME_AGENT_CC_EXTRA_ARGS": "new", f"{prefix}CC_EXTRA_ARGS": "old"})
        == "new"
    )


def test_precedence(path: Path) -> None:
    """--set over arguments, over RATCHET_*, over variables, over the file."""
    environment = {"SWE_EVAL_TIMEOUT_SEC": "1", "VLLM_ARGS": "--vllm-tool-call-parser hermes"}
    assert load_config(path, [], environment).engine.tool_parser == "hermes"
    environment["RATCHET_ENGINE__TOOL_PARSER"] = "glm45"
    assert load_config(path, [], environment).engine.tool_parser == "glm45"
    arguments = ["--vllm-tool-call-parser=llama3_json"]
    assert load_config(path, [], environment, arguments).engine.tool_parser == "llama3_json"
    assert load_config(path, ["engine.tool_parser=qwen3_xml"], environment, arguments).engine.tool_parser == "qwen3_xml"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rollout-batchsize", "8"], "`ratchet train` has no such argument"),
        (["--rollout-batchsize", "8"], "did you mean --rollout-batch-size"),
        (["--tensor-model-parallel-size", "2"], "has no such argument"),
        (["--rollout-batch-size"], "--rollout-batch-size: expected one value, got none"),
        (["--rollout-batch-size", "8", "9"], "expected one value, got 8 9"),
        (["--rollout-batch-size", "many"], "training.groups_per_step"),
        (["stray"], "'stray': expected an argument such as"),
        (["--vllm-logprobs-mode", "raw_logits"], "engine.args: --logprobs-mode"),
        (
            ["--save-debug-rollout-data", "dumps"],
            "expected one path that ends with .pt, with {rollout_id} in it, got dumps",
        ),
        (["--save-debug-rollout-data", "d/{rollout_id}.json"], "that ends with .pt"),
        *([[name, "a.b"], reason.split(";")[0]] for name, reason in REFUSED.items()),
    ],
)
def test_what_is_not_taken_is_refused(arguments: list[str], named: str, path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        dump_pattern(arguments)
        load_config(path, [], {}, arguments)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"), [("--tool-call-parser x", "does not begin with --vllm-"), ("'", "shell syntax")]
)
def test_wrong_vllm_args_are_refused(text: str, named: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(path, [], {"VLLM_ARGS": text})


def test_a_name_that_no_run_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAMP", "25/11 8h")
    with pytest.raises(ConfigError, match="cannot be the id of a run"):
        new_run_id("run")


LAUNCHER = """--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-context-len 96000
    --rollout-max-response-len 32768 --rollout-stop-token-ids 248046 248044 --num-rollout 100 --rollout-temperature 1.0
    --num-steps-per-rollout 1 --lr 1e-6 --weight-decay 0.1 --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.00
    --kl-loss-coef 0.00 --input-key prompt --label-key label --metadata-key metadata --vllm-tool-call-parser qwen3_coder
    --vllm-reasoning-parser qwen3"""
"""Arguments of the launcher run_qwen36_35b_a3b_swe_8nodes.sh."""


def test_the_config_of_eight_nodes_is_that_of_the_launcher(path: Path) -> None:
    """Its arguments change nothing in it, and set in an empty config what it sets."""
    mirrored = Path(__file__).parents[3] / "configs" / "qwen36_35b_a3b_swe_8nodes.yaml"
    environment = {"PROMPT_DATA": str(path.parent / "tasks.jsonl")}
    config = load_config(mirrored, [], environment)
    assert load_config(mirrored, [], environment, LAUNCHER.split()) == config
    bare = load_config(path, ["loss.preset=brief"], {}, LAUNCHER.split())
    for argument in VIME_ARGUMENTS:
        section, _, key = argument.key.partition(".")
        if argument.name in LAUNCHER and section != "datasets":
            assert getattr(getattr(config, section), key) == getattr(getattr(bare, section), key), argument.name
    assert (config.drift, config.loss.chain_credit, config.training.advantage) == ("drop", "split", "std")


def test_the_config_of_eight_nodes_names_every_line_of_the_launcher() -> None:
    """A reader of the launcher finds each variable and argument of it that sets a key; the reference has them all."""
    text = (Path(__file__).parents[3] / "configs" / "qwen36_35b_a3b_swe_8nodes.yaml").read_text()
    arguments = [word for word in LAUNCHER.split() if word.startswith("--")]
    names = [*arguments, "--prompt-data", *(one.name for one in VIME_VARIABLES if one.key is not None)]
    assert [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)] == []


ROLLOUT_ARGS = """--custom-generate-function-path examples.coding_agent_rl.generate.generate --prompt-data tasks.jsonl
    --input-key prompt --label-key label --metadata-key metadata --rollout-batch-size 8 --n-samples-per-prompt 8
    --rollout-max-context-len 96000 --rollout-max-response-len 32768 --rollout-stop-token-ids 248046 248044
    --save-debug-rollout-data runs/x/rollout_dumps/rollout_{rollout_id}.pt"""
VLLM_ARGS = "--vllm-tool-call-parser qwen3_coder --vllm-reasoning-parser qwen3 ..."


def test_the_blocks_of_arguments_are_taken_as_they_are_printed(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}")
    plain = tmp_path / "plain.yaml"
    plain.write_text("datasets: [{path: tasks.jsonl}]\n")
    arguments = [*ROLLOUT_ARGS.split(), *VLLM_ARGS.split()]
    config = load_config(plain, [], {}, arguments)
    assert dump_pattern(arguments) == "runs/x/rollout_dumps/rollout_{rollout_id}.pt"
    assert (config.sampling.max_context_tokens, config.training.bin_tokens) == (96000, 96000)
    assert "bin_tokens" not in RunConfig(datasets=config.datasets).model_dump(exclude_defaults=True)
    with pytest.raises(
        ConfigError, match=r"training.bin_tokens \(64000\) is below sampling.max_context_tokens \(96000\)"
    ):
        load_config(plain, ["training.bin_tokens=64000"], {}, arguments)
    assert config.harness.generate is None, "the brief's own function is what every rollout does"
