"""Check what a run needs before anything of it is started, in a second or two and without torch or vLLM.

`ratchet train` and `ratchet up` call it first; the activity that creates a run calls it again on the worker's machine.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from activities.harnesses.registry import Harnesses
from engine.weight_storage import check_address
from grading.rewards import find_reward
from ratchet import secrets
from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError
from ratchet.import_path import import_function
from ratchet.model_directory import megatron_checkpoint, model_of, require_config, require_model
from ratchet.suggestions import did_you_mean
from ratchet.temporal_settings import TemporalSettings


def check_run(config: RunConfig, settings: TemporalSettings) -> None:
    """Raise ConfigError, naming key, value and remedy, for what would otherwise fail in the middle of the run."""
    check_boxes(config, settings)
    find_reward(config.grading.reward)
    Harnesses()[config.harness.name].check(config.harness.all_options())
    secrets.resolve_references("harness.extra_env", config.harness.extra_env)
    for sink in config.metrics.sinks:
        secrets.resolve_references(f"metrics.sinks: {sink.name}: options", sink.options)
    own = {"loss.preset": config.loss.preset, "training.advantage": config.training.advantage}
    for key, value in own.items():
        if ":" in value:
            import_function(key, value)
    if config.harness.generate:
        import_function("harness.generate", config.harness.generate)
    for renderer in {one.renderer for one in config.datasets if one.renderer}:
        import_function("datasets.renderer", renderer)
    for key, name, package in (
        ("engine.tool_parser", config.engine.tool_parser, "tool_parsers"),
        ("engine.reasoning_parser", config.engine.reasoning_parser, "reasoning"),
    ):
        known = set(_vllm_parsers(package))
        if name is not None and known and name not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"{key}: vLLM has no parser {name!r}; it has {names}{did_you_mean(name, known)}")
    if config.training.weights_address is not None:
        check_address("training.weights_address", config.training.weights_address)
    if config.init_from is None and config.model not in TINY_POLICIES and config.uses_model:
        require_model(model_of(config))
    if config.loss.reference_kl and config.loss.reference_model is not None:
        reference = Path(config.loss.reference_model)
        if megatron_checkpoint(reference) is None:  # which is checked with the policy's form
            require_config("loss.reference_model", reference)
    if config.loss.distillation and config.loss.teacher_model is not None:
        require_config("loss.teacher_model", Path(config.loss.teacher_model))


def check_boxes(config: RunConfig, settings: TemporalSettings) -> None:
    """Raise ConfigError if the run may use more boxes than workers can run agents in."""
    if config.sandbox.max_boxes > settings.queues["agent"].slots * settings.agent_workers:
        raise ConfigError(
            f"sandbox.max_boxes ({config.sandbox.max_boxes}) is above the agent slots in temporal.yaml; "
            "raise queues.agent.slots or agent_workers"
        )


def _vllm_parsers(package: str) -> Iterator[str]:
    """Yield the names of vLLM's parsers, read from its source: importing them takes 12 CPU seconds.

    Nothing if vLLM is not installed here, or if a later version keeps the names in another way.
    """
    spec = find_spec("vllm")
    source = Path(spec.origin).parent / package / "__init__.py" if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        return
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key in node.value.keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
