"""The config of a run as one pydantic tree.

Every setting of a run is declared once, in `config_sections.py`, `config_loss.py` and `config_engines.py`. Unknown keys
are refused. `config_sources.py` reads the values from the file, the environment and the command line; the resolved tree
is stored in the run's row, and all parts read it from there.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ratchet.config_engines import DEFAULT_SET, PlacedEnginesConfig, engine_entries, require_set_name
from ratchet.config_loss import LOSS_PRESET_VALUES, LossConfig
from ratchet.config_sections import (
    ADVANTAGES,
    DEFAULT_BIN_TOKENS,
    METRIC_SINKS,
    DatasetConfig,
    EndpointConfig,
    EngineConfig,
    EvaluationConfig,
    GradingConfig,
    HarnessConfig,
    LimitsConfig,
    LoraConfig,
    MetricsConfig,
    MetricSinkConfig,
    SamplingConfig,
    SandboxConfig,
    Section,
    TrainingConfig,
)
from ratchet.suggestions import did_you_mean

__all__ = [
    "LOSS_PRESET_VALUES",
    "TINY",
    "TINY_CURRICULUM",
    "TINY_POLICIES",
    "DatasetConfig",
    "EndpointConfig",
    "LoraConfig",
    "LossConfig",
    "MetricSinkConfig",
    "PlacedEnginesConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "TrainingConfig",
]

TINY, TINY_CURRICULUM = "tiny", "tiny-curriculum"
TINY_POLICIES = (TINY, TINY_CURRICULUM)
"""Names of the policies that are made on this machine (examples/recipes.py)."""


def _with_bin(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with `training.bin_tokens`, if they do not name it and its default is below the context."""
    sampling, training = values.get("sampling"), values.get("training", {})
    context = sampling.get("max_context_tokens") if isinstance(sampling, Mapping) else None
    if not isinstance(context, int) or not isinstance(training, Mapping) or context <= DEFAULT_BIN_TOKENS:
        return values
    return {**values, "training": {"bin_tokens": context, **training}}


class RunConfig(Section):
    """The whole config of a run."""

    model: str = TINY
    """Path of a Hugging Face model directory, or a policy of our own: `tiny`, the default, or `tiny-curriculum`, for
    configs/curriculum.yaml. They are made on this machine, but `tiny` of seed 0 is in the package."""
    init_from: str | None = None
    """Weights to start from instead of the model's own: a directory, or `RUN@step` of a run with that step published.
    None, the default, uses the model's."""
    retrain: bool = False
    """With `init_from: RUN@step`: first train again what RUN trained after that step, with the rewards of now and
    without sampling, as `ratchet recall --apply` does. False is the default."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed of the task order, the split into updates, all shuffles and, for `tiny` and `tiny-curriculum`, the
    warm start."""
    drift: Literal["branch", "drop"] = "branch"
    """Training of a turn that later prompts tokenise differently: `branch`, the default, trains it as a chain of its
    own; `drop` gives it no loss weight (docs/adapter.md, "Forks, drift, thinking")."""
    engine: EngineConfig = EngineConfig()
    """Settings of the vLLM engines that serve the policy."""
    engines: Annotated[tuple[PlacedEnginesConfig, ...], Field(min_length=1), BeforeValidator(engine_entries)] = (
        PlacedEnginesConfig(),
    )
    """Number and placement of the engines; a number N stands for N engines on this machine."""
    engine_set: Annotated[str, AfterValidator(require_set_name)] = DEFAULT_SET
    """Name of the group of engines that answers this run and loads its weights. A group serves one run at a time, or
    `engine.lora_runs` with LoRA, so other runs that are to be open together need different names, and each name has
    engines of its own (docs/fleet.md, "Several runs at once"). `default` is the default."""
    endpoint: EndpointConfig | None = None
    """Server that answers the agents of an evaluation instead of the policy. None, the default, means the policy."""
    datasets: Annotated[list[DatasetConfig], Field(min_length=1)]
    """Datasets of the run; at least one with `use: train`, unless `training.steps` is 0."""
    harness: HarnessConfig = HarnessConfig()
    """The agent program and its limits."""
    sandbox: SandboxConfig = SandboxConfig()
    """Number and size of the boxes."""
    sampling: SamplingConfig = SamplingConfig()
    """Temperature and token limits of model calls."""
    loss: LossConfig = LossConfig()
    """The token loss."""
    training: TrainingConfig = TrainingConfig()
    """Steps, groups and the optimiser."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations on held-out tasks."""
    grading: GradingConfig = GradingConfig()
    """Verdicts and rewards."""
    metrics: MetricsConfig = MetricsConfig()
    """Copies of the learner's metrics in other tools."""
    limits: LimitsConfig = LimitsConfig()
    """Time and size limits of a rollout."""

    @property
    def uses_model(self) -> bool:
        """True if the model answers, or if an endpoint's answers are stored as its tokens."""
        return self.endpoint is None or self.endpoint.tokens

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """Fill in the preset's values, and a bin for the longest context, for keys that the config does not set."""
        values = _with_bin(values) if isinstance(values, Mapping) else values
        loss = values.get("loss") if isinstance(values, Mapping) else None
        preset = LOSS_PRESET_VALUES.get(str(loss.get("preset"))) if isinstance(loss, Mapping) else None
        if not isinstance(loss, Mapping) or not preset:
            return values
        own = {name: value for name, value in preset.items() if name in LossConfig.model_fields}
        filled = {**values, "loss": {**own, **loss}}
        if "drift" in preset:
            filled.setdefault("drift", preset["drift"])
        training = values.get("training", {})
        if "advantage" in preset and isinstance(training, Mapping):
            filled["training"] = {"advantage": preset["advantage"], **training}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, value, known in (
            ("loss.preset", self.loss.preset, LOSS_PRESET_VALUES),
            ("training.advantage", self.training.advantage, ADVANTAGES),
            *(("metrics.sinks.name", one.name, METRIC_SINKS) for one in self.metrics.sinks),
        ):
            if value not in known and ":" not in value:
                raise ValueError(
                    f"{key}: {value!r} is unknown; expected {', '.join(known)}, or a path such as package.module:name"
                    + did_you_mean(value, known)
                )
        if not any(one.use == "train" and one.weight != 0 for one in self.datasets) and self.training.steps:
            raise ValueError("datasets: at least one needs use: train, with a weight above 0")
        if self.endpoint is not None and self.training.steps:
            raise ValueError(
                "endpoint: nothing can be trained while an endpoint answers; training.steps must be 0, and "
                "`ratchet train --from-store` trains its rollouts afterwards if endpoint.tokens is true"
            )
        if self.evaluation.forked_turn_id is not None and self.training.steps:
            raise ValueError("evaluation.forked_turn_id: forks are not trained; training.steps must be 0")
        if self.training.forks.share and self.harness.generate:
            raise ValueError("training.forks.share: a function of harness.generate makes no forks; it must be 0")
        if self.sampling.max_response_tokens > self.sampling.max_context_tokens:
            raise ValueError("sampling.max_response_tokens is above sampling.max_context_tokens")
        if self.training.min_graded is not None and self.training.min_graded > self.training.group_size:
            raise ValueError("training.min_graded is above training.group_size: no group could ever be trained on")
        if self.training.solve_rates is not None and self.training.solve_rates[0] > self.training.solve_rates[1]:
            raise ValueError("training.solve_rates: the lower bound is above the upper one")
        if self.training.bin_tokens < self.sampling.max_context_tokens:
            raise ValueError(
                f"training.bin_tokens ({self.training.bin_tokens}) is below sampling.max_context_tokens "
                f"({self.sampling.max_context_tokens}), so the longest chain would not fit into a bin; raise it, or "
                "leave it out, which makes it as large as the context"
            )
        if self.training.lora is not None and any(one.address is not None for one in self.engines):
            raise ValueError(
                "training.lora: an engine with adapters must be started by this stack; leave engines.address out"
            )
        if self.training.lora is None and self.engine.lora_runs > 1:
            raise ValueError("engine.lora_runs: only runs with training.lora share engines; leave it out")
        if self.training.group_size < 2:
            raise ValueError("training.group_size must be at least 2: one rollout has nothing to be compared with")
        return self
