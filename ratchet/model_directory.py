"""Find the directory of a config's model, and check that it holds a model config and a chat template."""

import json
from pathlib import Path

from ratchet import paths
from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError


def model_of(config: RunConfig) -> Path:
    """Return the directory that `model` names, whether or not it exists."""
    made_here = config.model in TINY_POLICIES
    return paths.tiny_policy(config.model, config.seed) if made_here else Path(config.model)


def frozen_models(config: RunConfig) -> list[Path | None]:
    """Return the directories of the run's reference and teacher, None for one that has the policy's own weights."""
    loss = config.loss
    wanted = [loss.reference_model] if loss.reference_kl else []
    wanted += [loss.teacher_model] if loss.distillation else []
    return [None if path is None else Path(path) for path in wanted]


def require_model(model: Path) -> None:
    """Raise ConfigError if the directory is not usable as a policy, naming what is missing and what to do."""
    require_config("model", model)
    if not _has_chat_template(model):
        raise ConfigError(
            f"model: {model} has no chat template; add chat_template.jinja or choose an instruction-tuned model"
        )


def require_config(key: str, model: Path) -> None:
    """Raise ConfigError, which names the config's `key`, if the directory holds no model in Hugging Face's format."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{key}: {model} has no config.json; name a Hugging Face model directory; a model of the hub "
            "must be downloaded first, for example with `hf download NAME --local-dir DIR`"
        )


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    settings = model / "tokenizer_config.json"
    return settings.is_file() and bool(json.loads(settings.read_text()).get("chat_template"))
