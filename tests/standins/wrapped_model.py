"""A tiny model of a class that is published with a vision tower around a text model, with random weights."""

from pathlib import Path

TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DENSE = {"intermediate_size": 48}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


def make_wrapped_model(name: str, directory: Path, dtype: str = "float32", **text: object) -> Path:
    """Write config and weights of the class `name`, with a layer that predicts several tokens, into `directory`.

    `text`: values of the text model's config that are added or replaced.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))(
        text_config=TEXT | (EXPERTS if "Moe" in name else DENSE) | text,
        vision_config=VISION,
        tie_word_embeddings=bool(text.get("tie_word_embeddings")),
    )
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # far from linear, so that a wrong mask changes the result
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights["mtp.fc.weight"] = torch.randn(32, 64, dtype=getattr(torch, dtype))  # transformers has no such layers
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def fuse_experts(directory: Path) -> None:
    """Store all experts of a layer as one tensor, as some models are published."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    for layer in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        parts = {
            part: torch.stack([weights.pop(f"{layer}.experts.{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        }
        weights[f"{layer}.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        weights[f"{layer}.experts.down_proj"] = parts["down"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def rename_tensor(directory: Path, name: str, other: str) -> None:
    """Rename a tensor of `model.safetensors`."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    weights[other] = weights.pop(name)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
