"""Names of vime and slime that set our keys: environment variables, and arguments of their training command.

A user of examples/coding_agent_rl finds every knob of its README here; docs/reference/vime.md is made from them.

Precedence: `--set` > arguments > `RATCHET_*` > variables > the YAML file. Names that set no key of a run's config are
read by a part of the stack; the table says which.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from ratchet.errors import ConfigError
from ratchet.suggestions import did_you_mean

TRAIN_DATASETS = "datasets.*"
"""Prefix of keys that are set in every dataset with `use: train`."""
EXTRA_ENVS_VARIABLE = "VIME_AGENT_CC_EXTRA_ENVS"
VLLM_ARGS = "VLLM_ARGS"


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable. `key`: the config's key that it sets, None if a part of the stack reads it.

    `harness`: the only harness for whose runs it is read. `is_text`: whether its value is taken as it is, not as YAML.
    """

    name: str
    key: str | None
    meaning: str
    harness: str | None = None
    is_text: bool = False


VIME_VARIABLES = (
    Variable("HF_CHECKPOINT", "model", "Directory of the model."),
    Variable("REF_MODEL_PATH", "loss.reference_model", "Directory of the reference; read if `loss.reference_kl` > 0."),
    Variable("PROMPT_DATA", f"{TRAIN_DATASETS}.path", "File of the training tasks, instead of the config's."),
    Variable("SWE_AGENT_TIME_BUDGET_SEC", "limits.agent_seconds", "Time budget of the agent's program."),
    Variable("SWE_EVAL_TIMEOUT_SEC", "limits.eval_seconds", "Time limit of one grade."),
    Variable("SWE_ROLLOUT_GUARD_SEC", "limits.guard_seconds", "Time limit of a rollout."),
    Variable("SWE_CC_PROMPT", "harness.prompt", "Template of the user message.", is_text=True),
    Variable(
        "VIME_AGENT_CC_EXTRA_ARGS", "harness.extra_args", "Arguments of `claude`.", harness="claude_code", is_text=True
    ),
    Variable(
        EXTRA_ENVS_VARIABLE,
        "harness.extra_env",
        "JSON object of environment variables for `claude`. The config gets references; workers look the values up.",
        harness="claude_code",
    ),
    Variable(VLLM_ARGS, "engine.args", "Arguments `--vllm-…` in shell syntax, as in the table of arguments."),
    Variable("ADAPTER_PUBLIC_HOST", None, "Adapter: address that boxes call. Default: MASTER_ADDR, else loopback."),
    Variable("MASTER_ADDR", None, "Adapter: the default of ADAPTER_PUBLIC_HOST. torchrun reads it, too."),
    Variable("ADAPTER_BIND_HOST", None, "Adapter: address to listen on. Default: loopback, unless boxes call another."),
    Variable("ADAPTER_PORT", None, "Adapter: port to listen on."),
    Variable("E2B_API_KEY", None, "Workers: key of the sandbox service; `e2b_` and 40 hexadecimal characters."),
    Variable(
        "VIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", None, "Workers: metadata key of a task's image. Default: `image`."
    ),
    Variable("VIME_AGENT_NODE_TARBALL", None, "Workers: Node.js for a Claude Code tarball that is a script."),
    Variable(
        "VIME_AGENT_CC_TARBALL",
        None,
        "Workers: tarball of Claude Code, unpacked when a run starts; `ratchet admin agents fetch` gets one.",
    ),
    Variable("SWE_BOOT_CONCURRENCY", None, "Workers: number of parallel boots, of agents and grades together."),
    Variable("HOSTFILE", None, "`ratchet launch`: file with one host per line. Default: /root/mpi_rack_hostfile."),
    Variable("EXP_TAG", None, "First part of a new run's id, and of its directory, instead of the config file's name."),
    Variable("STAMP", None, "Second part of a new run's id, and of its directory, instead of the time."),
)
_PREFIXES = ("VIME_AGENT_", "SWE_", "SLIME_AGENT_")
"""A variable VIME_AGENT_X may also be called SWE_X, its older name, or SLIME_AGENT_X, slime's."""


def value_of(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the value of a variable, or of its older name or slime's; None if it is unset or empty."""
    environment = os.environ if environment is None else environment
    stem = name.removeprefix(_PREFIXES[0])
    names = [name] if stem == name else [prefix + stem for prefix in _PREFIXES]
    return next((environment[one] for one in names if environment.get(one)), None)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of `ratchet train` that sets a key. `takes_list`: whether it takes several values."""

    name: str
    key: str
    meaning: str
    takes_list: bool = False


GENERATE = "--custom-generate-function-path"
BRIEFS_GENERATE = "examples.coding_agent_rl.generate.generate"
"""The brief's own function, whose stages every rollout has here."""
VIME_ARGUMENTS = (
    Argument("--hf-checkpoint", "model", "Directory of the model."),
    Argument("--ref-load", "loss.reference_model", "Directory of the reference; read if `loss.reference_kl` > 0."),
    Argument("--prompt-data", f"{TRAIN_DATASETS}.path", "File of the training tasks."),
    Argument("--input-key", f"{TRAIN_DATASETS}.input_key", "Column with the problem statement."),
    Argument("--label-key", f"{TRAIN_DATASETS}.label_key", "Column with the task's label."),
    Argument("--metadata-key", f"{TRAIN_DATASETS}.metadata_key", "Column with image, working directory and grader."),
    Argument("--num-rollout", "training.steps", "Number of steps."),
    Argument("--rollout-batch-size", "training.groups_per_step", "Number of groups per step."),
    Argument("--n-samples-per-prompt", "training.group_size", "Number of rollouts per group."),
    Argument("--num-steps-per-rollout", "training.updates_per_step", "Number of optimiser updates per step."),
    Argument("--rollout-max-context-len", "sampling.max_context_tokens", "Tokens of prompt and output together."),
    Argument("--rollout-max-response-len", "sampling.max_response_tokens", "Output tokens of one model call."),
    Argument("--rollout-temperature", "sampling.temperature", "Sampling temperature."),
    Argument("--rollout-stop-token-ids", "engine.stop_token_ids", "Further ids that end an answer.", takes_list=True),
    Argument(GENERATE, "harness.generate", f"Your own `generate`; `{BRIEFS_GENERATE}` stands for the stages."),
    Argument("--vllm-tool-call-parser", "engine.tool_parser", "vLLM's parser of tool calls."),
    Argument("--vllm-reasoning-parser", "engine.reasoning_parser", "vLLM's parser of reasoning."),
    Argument("--lr", "training.learning_rate", "Learning rate."),
    Argument("--weight-decay", "training.weight_decay", "AdamW's weight decay."),
    Argument("--eps-clip", "loss.clip_low", "Lower clip bound."),
    Argument("--eps-clip-high", "loss.clip_high", "Upper clip bound."),
    Argument("--entropy-coef", "loss.entropy_bonus", "Factor of the entropy."),
    Argument("--kl-loss-coef", "loss.reference_kl", "Factor of the KL to the reference."),
)
DUMPS = "--save-debug-rollout-data"
"""Takes a path with ROLLOUT_ID in it; it sets no key, so that a run goes on with other paths."""
ROLLOUT_ID = "{rollout_id}"
"""Stands for the step in the path of a debug dump (training/rollout_dumps.py)."""
_VLLM = "--vllm-"
OTHER_VLLM = "engine.args"
"""The key to which `--vllm-X VALUE` adds `--X VALUE`, if X has no key of its own."""
REFUSED = {
    "--custom-rm-path": "a reward of your own is `grading.reward: package.module:function`",
    "--custom-loss-function-path": "a loss of your own is `loss.preset: package.module:function`",
    "--custom-advantage-function-path": "advantages of your own are `training.advantage: package.module:function`",
}
"""Arguments that name a function of vime's interface, and what takes their place."""


class Setting(NamedTuple):
    """A key and its value. `name`: of the variable or argument that sets it; an argument's value is still text."""

    name: str
    key: str
    value: Any


def settings_of_arguments(arguments: Sequence[str]) -> list[Setting]:
    """Return what arguments of vime's training command set. Raises ConfigError for one that is not known."""
    known = {one.name: one for one in VIME_ARGUMENTS}
    found: list[Setting] = []
    for name, values in _with_values(arguments):
        if name == DUMPS or (name, *values) == (GENERATE, BRIEFS_GENERATE):
            continue
        if name in REFUSED:
            raise ConfigError(f"{name} {' '.join(values)}: not supported: {REFUSED[name]}")
        if name in known:
            found.append(Setting(name, known[name].key, _value(known[name], values)))
        elif name.startswith(_VLLM):
            found.append(Setting(name, OTHER_VLLM, ["--" + name.removeprefix(_VLLM), *values]))
        else:
            raise ConfigError(
                f"{name}: `ratchet train` has no such argument; docs/vime.md lists those of vime that it takes, "
                f"`--set KEY=VALUE` sets any key{did_you_mean(name, known)}"
            )
    return found


def dump_pattern(arguments: Sequence[str]) -> str | None:
    """Return the path pattern of DUMPS, None without the argument. Raises ConfigError."""
    for name, values in _with_values(arguments):
        if name == DUMPS:
            if len(values) != 1 or ROLLOUT_ID not in values[0] or not values[0].endswith(".pt"):
                got = " ".join(values) or "none"
                raise ConfigError(f"{DUMPS}: expected one path that ends with .pt, with {ROLLOUT_ID} in it, got {got}")
            return values[0]
    return None


def settings_of_vllm_args(text: str) -> list[Setting]:
    """Return what the variable VLLM_ARGS sets. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{VLLM_ARGS}: {text[:80]!r} is not in shell syntax: {error}") from None
    for word in words:
        if word.startswith("--") and not word.startswith(_VLLM):
            raise ConfigError(f"{VLLM_ARGS}: {word} does not begin with {_VLLM}, as vime's arguments for vLLM do")
    return settings_of_arguments(words)


def _with_values(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group the arguments: each name `--x` with the values up to the next one, or its part after `=`."""
    found: list[tuple[str, list[str]]] = []
    for one in arguments:
        if one.startswith("--"):
            name, equals, value = one.partition("=")
            found.append((name, [value] if equals else []))
        elif found and one != "...":  # with which the README's block goes on
            found[-1][1].append(one)
        elif not found:
            raise ConfigError(f"{one!r}: expected an argument such as --rollout-batch-size 8")
    return found


def _value(argument: Argument, values: list[str]) -> str | list[str]:
    if argument.takes_list:
        return values
    if len(values) != 1:
        raise ConfigError(f"{argument.name}: expected one value, got {' '.join(values) or 'none'}")
    # vime writes the path of a function with a point before its name.
    return ":".join(values[0].rsplit(".", 1)) if argument.name == GENERATE and ":" not in values[0] else values[0]


def values_of_arguments(config: Any) -> dict[str, Any]:
    """Return the values of a run's config under vime's names of attributes of `args`."""
    keys = {one.name: one.key for one in VIME_ARGUMENTS if not one.key.startswith(TRAIN_DATASETS)}
    return {name[2:].replace("-", "_"): reduce(getattr, key.split("."), config) for name, key in keys.items()}
