"""A checkpoint's weights as a Hugging Face directory, by one process, whatever number of ranks wrote it.

Why here: what was trained leaves as something that every other program loads.
Called by: `ratchet checkpoints export`.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine import policy_files
from training import checkpoint
from training.learner import published_state
from training.policy_model import TrainablePolicy


def export_checkpoint(model_path: Path, uri: str, directory: Path) -> None:
    """`model_path`: the directory that the run started from. Raises ValueError where the checkpoint is another model's."""
    policy = TrainablePolicy(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    )
    policy_files.publish_policy(
        published_state(checkpoint.load_weights(policy, uri), model_path), model_path, directory
    )
