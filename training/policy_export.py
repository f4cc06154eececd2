"""Export a checkpoint's weights as a Hugging Face model directory or, with LoRA, as a PEFT directory.

One process does it, for a checkpoint written by any number of ranks.
"""

import json
from pathlib import Path

import torch

from engine import policy_files
from ratchet.config import LoraConfig
from training import checkpoint, lora, model_files
from training.learner import published_tensors
from training.policy_model import TrainablePolicy


def export_checkpoint(model_path: Path, uri: str, directory: Path) -> None:
    """Write the directory. `model_path`: the run's initial model, whose config and tokenizer are copied.

    An adapter's directory has its own files only, and names that model as its base.
    """
    model = model_files.load_causal_lm(model_path, torch.float32)
    policy = TrainablePolicy(model)
    adapter = checkpoint.read_adapter(uri)
    if adapter is not None:
        settings = LoraConfig.model_validate({name: json.loads(adapter)[name] for name in LoraConfig.model_fields})
        lora.add_adapters(model, settings)
        state = dict(lora.adapter_tensors(checkpoint.load_weights(policy, uri)))
        base = policy_files.weight_files(policy_files.describe_files(model_path))
        state = model_files.adapter_as_in_files(model, state)
        policy_files.publish_adapter(state, lora.peft_config(settings, model_path), model_path, base, directory)
        return
    tensors = dict(published_tensors(model, checkpoint.load_weights(policy, uri), model_path))
    untouched = policy_files.UntouchedTensors(model_path, model_files.untouched_names(model, model_path))
    policy_files.publish_policy(model_files.as_in_files(model, tensors), model_path, directory, untouched)
