"""Export a checkpoint's weights as a Hugging Face model directory, which other programs can load.

One process does it, for a checkpoint written by any number of ranks.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine import policy_files
from training import checkpoint
from training.learner import published_tensors
from training.policy_model import TrainablePolicy


def export_checkpoint(model_path: Path, uri: str, directory: Path) -> None:
    """Write the model directory. `model_path`: the run's initial model, whose config and tokenizer are copied."""
    policy = TrainablePolicy(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    )
    tensors = dict(published_tensors(checkpoint.load_weights(policy, uri), model_path))
    policy_files.publish_policy(tensors, model_path, directory)
