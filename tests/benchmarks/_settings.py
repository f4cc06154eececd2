"""What a benchmark tells the learner: the fields of a run's config that it reads.

Why here: a machine with a card may have torch and transformers alone, and the config itself needs pydantic. A test holds the values
below against the config's own.
Called by: `training.py` and `_sizes.py` beside this file, `tests/unit/training/test_benchmark.py`.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from ratchet.config import RunConfig

LOSS = {"preset": "dapo", "clip_low": 0.2, "clip_high": 0.28, "entropy_bonus": 0.0}
TRAINING = {
    "learning_rate": 1e-6,
    "warmup_steps": 0,
    "betas": (0.9, 0.95),
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "bin_tokens": 32768,
    "packing": "auto",
    "dtype": "float32",
    "fp32_head": False,
    "activation_checkpointing": False,
}


def settings(**training: Any) -> "RunConfig":
    """The defaults, but for `training`. A field that the learner reads and that is missing here is an AttributeError."""
    return cast(
        "RunConfig", SimpleNamespace(loss=SimpleNamespace(**LOSS), training=SimpleNamespace(**{**TRAINING, **training}))
    )
