"""Export a checkpoint's weights as a Hugging Face model directory or, with LoRA, as a PEFT directory.

One process does it, for a checkpoint written by any number of ranks.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine import policy_files
from ratchet.config import LoraConfig
from training import checkpoint, lora
from training.learner import published_tensors
from training.policy_model import TrainablePolicy


def export_checkpoint(model_path: Path, uri: str, directory: Path) -> None:
    """Write the directory. `model_path`: the run's initial model, whose config and tokenizer are copied.

    An adapter's directory has its own files only, and names that model as its base.
    """
    policy = TrainablePolicy(
        AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    )
    adapter = checkpoint.read_adapter(uri)
    if adapter is not None:
        settings = LoraConfig.model_validate({name: json.loads(adapter)[name] for name in LoraConfig.model_fields})
        lora.add_adapters(policy.model, settings)
        state = dict(lora.adapter_tensors(checkpoint.load_weights(policy, uri)))
        base = policy_files.weight_files(policy_files.describe_files(model_path))
        policy_files.publish_adapter(state, lora.peft_config(settings, model_path), model_path, base, directory)
        return
    tensors = dict(published_tensors(checkpoint.load_weights(policy, uri), model_path))
    policy_files.publish_policy(tensors, model_path, directory)
