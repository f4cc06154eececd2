"""The section `loss` of a run's config, and the values of its presets."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ratchet.bounded_numbers import Positive
from ratchet.config_sections import Section


class LossConfig(Section):
    """The token loss and how it is averaged."""

    preset: str = "icepop"
    """Name of the token loss: grpo, dr_grpo, dapo, gspo, cispo, tis, icepop, seq_mis, sft, brief (training/loss.py
    names the papers), or a function as `package.module:function`. A preset also sets the defaults of clip_low,
    clip_high, ratio_cap, reducer and training.advantage, and brief those of chain_credit and drift. icepop is the
    default because it masks tokens whose probability differs between engine and learner."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clip bound of grpo, dr_grpo, dapo and gspo: the probability ratio is kept at or above 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Upper clip bound of grpo, dr_grpo, dapo and gspo: the probability ratio is kept at or below 1 + clip_high."""
    mask_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of icepop: a token whose ratio to its recorded probability is below this gets no gradient."""
    mask_high: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of icepop: a token whose ratio to its recorded probability is above this gets no gradient."""
    ratio_cap: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of the probability ratio: of a token in tis, cispo, reference_kl and distillation, of a turn in
    seq_mis."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the policy's entropy at each trained token, subtracted from the token's loss. 0, the default, computes
    the entropy for the metrics only."""
    reducer: Literal["token_mean", "rollout_mean", "prompt_mean", "constant"] = "token_mean"
    """Averaging of token losses: over all tokens of an update, over rollouts first, over groups first, or by a constant
    divisor. token_mean, the default, gives every token the same weight."""
    constant_tokens: Positive = 1024
    """Divisor of the `constant` reducer, in tokens per rollout; other reducers ignore it."""
    chain_credit: Literal["whole", "split"] = "whole"
    """Share of a rollout's advantage that each of its K chains gets: all, or 1/K. `split` together with the reducer
    rollout_mean makes a rollout with sub-agents or compactions count K times less, so `whole` is the default."""
    reference_kl: Annotated[float, Field(ge=0)] = 0.0
    """Factor of KL(policy || reference) at each trained token, by the k3 estimator (training/reference.py), added to
    the token's loss. 0, the default, loads no reference."""
    reference_model: str | None = None
    """Directory of the reference for `reference_kl`: a Hugging Face model, or a checkpoint of Megatron-core
    (`torch_dist`) with the policy's architecture. None, the default, means the weights that the run began with
    (REF_MODEL_PATH)."""
    distillation: Annotated[float, Field(ge=0)] = 0.0
    """Factor of on-policy distillation (training/reference.py): at each trained token the policy is drawn towards the
    teacher. Groups of equal rewards, and rollouts without a positive advantage, are then trained, too. 0, the default,
    loads no teacher."""
    teacher_model: str | None = None
    """Directory of the teacher for `distillation`, a model with the policy's tokenizer, for example a larger one. None
    by default."""
    reward_factor: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the preset's loss, which the rewards drive. 1 by default; 0 learns from the teacher and the reference
    alone."""

    @model_validator(mode="after")
    def _has_teacher(self) -> Self:
        if self.distillation and self.teacher_model is None:
            raise ValueError("distillation: needs teacher_model, the directory of the model to learn from")
        if self.distillation and self.preset == "sft":
            raise ValueError("distillation: the preset sft trains solved rollouts only; use another preset with it")
        return self


LOSS_PRESET_VALUES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "reducer": "rollout_mean", "advantage": "std"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "reducer": "constant", "advantage": "mean"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "reducer": "token_mean", "advantage": "std"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "reducer": "rollout_mean", "advantage": "std"},
    "cispo": {"ratio_cap": 5.0, "reducer": "token_mean", "advantage": "std"},
    "tis": {"ratio_cap": 2.0},
    "icepop": {"mask_low": 0.5, "mask_high": 5.0},
    "seq_mis": {"ratio_cap": 2.0},
    "sft": {},
    "brief": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "reducer": "rollout_mean",
        "chain_credit": "split",
        "advantage": "std",
        "drift": "drop",
    },
}
"""The values of each preset's paper, used for keys that the config does not set; a missing key keeps its own
default. `brief`: those of slime's and vime's example coding_agent_rl."""
