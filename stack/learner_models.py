"""The models of a run's learner: policy, reference and teacher, and what the run's config asks of them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError
from ratchet.model_directory import frozen_models, megatron_checkpoint, model_of, require_config

if TYPE_CHECKING:
    from training.model_facts import ModelFacts

_Question = Callable[["ModelFacts"], str | None]


class LearnerModels:
    """The models of a config's learner. Each directory is read once, when something is asked about its model."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._facts: dict[Path, ModelFacts] = {}

    def facts(self, model: Path) -> "ModelFacts":
        """Return the facts about a model directory. Raises ValueError or OSError if transformers cannot read it."""
        from training.model_facts import ModelFacts

        if model not in self._facts:
            self._facts[model] = ModelFacts.read(self._form(model))
        return self._facts[model]

    def _form(self, model: Path) -> Path:
        """Return the directory with the model's config: of Megatron-core's checkpoint, that of the policy."""
        return model if megatron_checkpoint(model) is None else model_of(self.config)

    def require_trainable(self) -> None:
        """Raise ConfigError if a model does not allow what the config asks for: `training.router_replay`,
        `expert_parallel`, `sequence_parallel`, or chains as long as `sampling.max_context_tokens`; or if its weights
        are quantised."""
        training = self.config.training
        for model in self._models() if training.steps > 0 else []:  # an evaluation has no learner
            if (reason := self._why_no_training(model)) is not None:
                raise ConfigError(f"the learner cannot use {model} with this config: {reason}")
        if training.sequence_parallel > 1 and (reason := self._why_no_shared_bins()) is not None:
            raise ConfigError(f"training.sequence_parallel: {reason}; use another number, or leave it out")
        if training.router_replay and (reason := self._ask_policy(lambda facts: facts.sizes.no_replay)) is not None:
            raise ConfigError(f"training.router_replay: {reason}; leave it out")
        if training.expert_parallel > 1 and (reason := self._why_undivided()) is not None:
            raise ConfigError(f"training.expert_parallel: {reason}; use another number, or leave it out")

    def _models(self) -> list[Path]:
        """Return reference, teacher and policy. A tiny policy may not be made yet, so the learner looks at it."""
        policy = [] if self.config.model in TINY_POLICIES else [model_of(self.config)]
        return [*filter(None, frozen_models(self.config)), *policy]

    def _why_no_training(self, model: Path) -> str | None:
        """Return why the model cannot be trained, None if it can, or if it cannot be read: then the learner says so."""
        try:
            facts = self.facts(model)
        except (OSError, ValueError):
            return None
        reason = facts.why_no_training(self.config.sampling.max_context_tokens)
        if reason is None and (checkpoint := megatron_checkpoint(model)) is not None:
            from training.megatron_checkpoint import why_another_model

            reason = why_another_model(checkpoint, facts.settings)
        return reason

    def _why_no_shared_bins(self) -> str | None:
        from training.sequence_parallel import why_no_groups
        from training.service import default_workers

        size = self.config.training.sequence_parallel
        if (reason := why_no_groups(default_workers(self.config), size)) is not None:
            return reason
        if self.config.training.packing == "padded":
            return "training.packing: padded has whole rows"
        reasons = (self._ask(model, lambda facts: facts.why_no_sequence_parallel(size)) for model in self._models())
        return next(filter(None, reasons), None)

    def _why_undivided(self) -> str | None:
        from training.service import default_workers

        training = self.config.training
        ranks_of_copy = training.shard_ranks or default_workers(self.config)
        return self._ask_policy(lambda facts: facts.why_no_expert_parallel(training.expert_parallel, ranks_of_copy))

    def _ask_policy(self, question: _Question) -> str | None:
        if self.config.model in TINY_POLICIES:
            return "the tiny policy has no experts"
        return self._ask(model_of(self.config), question)

    def _ask(self, model: Path, question: _Question) -> str | None:
        """Return the answer, or why the model cannot be trained. Raises ConfigError if there is no model."""
        require_config("model", self._form(model))
        try:
            return question(self.facts(model))
        except (OSError, ValueError) as error:
            return f"{model} cannot be trained here: {error}"
