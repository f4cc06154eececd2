"""The config fields that the learner reads, with their defaults, for benchmarks.

A machine with a GPU may have torch and transformers alone, and the config needs pydantic. A test compares the values
with the config's.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ratchet.config import RunConfig

LOSS = {
    "preset": "dapo",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "entropy_bonus": 0.0,
    "reference_kl": 0.0,
    "reward_factor": 1.0,
    "distillation": 0.0,
    "teacher_model": None,
}
TRAINING = {
    "lora": None,
    "learning_rate": 1e-6,
    "warmup_steps": 0,
    "betas": (0.9, 0.95),
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "bin_tokens": 32768,
    "packing": "auto",
    "router_replay": False,
    "shard_ranks": None,
    "expert_parallel": 1,
    "sequence_parallel": 1,
    "dtype": "auto",
    "fp32_head": False,
    "activation_checkpointing": None,
    "fused_kernels": None,
}


def settings(**training: Any) -> "RunConfig":
    """The defaults, changed by `training`. Raises AttributeError in the learner for a field that is missing here."""
    return cast(
        "RunConfig",
        SimpleNamespace(
            seed=0,
            sampling=SimpleNamespace(max_context_tokens=65536),
            loss=SimpleNamespace(**LOSS),
            training=SimpleNamespace(**{**TRAINING, **training}),
        ),
    )
