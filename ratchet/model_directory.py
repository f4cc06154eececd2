"""Find, read and check the directory of a config's model; raises ConfigError for what is missing or broken."""

import json
import re
from pathlib import Path
from typing import Any

from ratchet import paths
from ratchet.config import TINY_POLICIES, RunConfig
from ratchet.errors import ConfigError

_OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
"""Files of tokenizers that are not read here: those of sentencepiece, tiktoken and Mistral, and GPT-2's old pair."""
_READS_TOOLS = re.compile(r"\{[{%](?:(?!%\}|\}\}).)*?(?<![\w.'\"])tools\b", re.DOTALL)
"""The variable in a tag of a template; its text and comments may have the word, too."""
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
_POINTER = "version https://git-lfs.github.com/spec/"
"""The beginning of a Git LFS pointer, which stands for a file that was not fetched."""


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


def megatron_checkpoint(model: Path) -> Path | None:
    """Return the directory of the distributed checkpoint of Megatron-core (`torch_dist`) that a directory has, None if
    it has none: the directory itself, or the one that latest_checkpointed_iteration.txt names."""
    tracker = model / "latest_checkpointed_iteration.txt"
    latest = tracker.read_text().strip() if tracker.is_file() else ""
    found = model / (f"iter_{int(latest):07d}" if latest.isdecimal() else latest)
    return found if (found / ".metadata").is_file() else None


def require_model(model: Path) -> None:
    """Raise ConfigError if the directory is not usable as a policy, naming what is missing and what to do."""
    require_config("model", model)
    if not read_chat_template(model):
        raise ConfigError(
            f"model: {model} has no chat template; add chat_template.jinja or choose an instruction-tuned model"
        )
    read_model_json(model, "tokenizer.json")
    _require_whole_weights(model)


def require_config(key: str, model: Path) -> None:
    """Raise ConfigError, which names the config's `key`, if the directory holds no model in Hugging Face's format."""
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{key}: {model} has no config.json; name a Hugging Face model directory; a model of the hub "
            "must be downloaded first, for example with `hf download NAME --local-dir DIR`, and a `torch_dist` "
            "checkpoint converted with vime's tools/convert_torch_dist_to_hf.py"
        )
    read_model_json(model, "config.json")


def read_model_file(model: Path, name: str) -> str | None:
    """Return the text of a file of a model directory, None if it is missing. Raises ConfigError if it is no text."""
    path = model / name
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
    if text.startswith(_POINTER):
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file; fetch it with `git lfs pull` in {model}")
    return text


def read_model_json(model: Path, name: str, required: bool = True) -> dict[str, Any]:
    """Return a file's JSON object, {} if it is missing. ConfigError if `required` and missing, or no JSON object."""
    text = read_model_file(model, name)
    if text is None:
        if required:
            raise ConfigError(f"model directory {model} has no {name}; {_remedy(model, name)}")
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{model / name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{model / name} has {type(found).__name__} for a JSON object; give the model's own file")
    return found


def read_chat_template(model: Path) -> str | None:
    """Return the text of the model's chat template, None if it has none.

    Of several, that is `default`, or `tool_use` if only that one shows tools, which agents have. Raises ConfigError if
    a file is broken, or if several have other names.
    """
    template = read_model_json(model, "tokenizer_config.json", required=False).get("chat_template")
    if template is None:  # a processor's file, whose template may show no tools
        template = read_model_json(model, "chat_template.json", required=False).get("chat_template")
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found = {one.get("name"): one.get("template") for one in listed if isinstance(one, dict)}
    for path in sorted((model / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_model_file(path.parent, path.name)
    if (text := read_model_file(model, "chat_template.jinja")) is not None:
        found["default"] = text
    named = {str(name): text for name, text in found.items() if isinstance(text, str)}
    known = [text for name in ("default", "tool_use") if (text := named.get(name)) is not None]
    if named and not known:
        names = ", ".join(sorted(named))
        raise ConfigError(
            f"model directory {model} has the chat templates {names}, neither `default` nor `tool_use`; put the one "
            "that shows tools into chat_template.jinja"
        )
    return next((text for text in known if _READS_TOOLS.search(text)), known[0] if known else None)


def _remedy(model: Path, missing: str) -> str:
    others = [name for name in _OTHER_TOKENIZERS if (model / name).is_file()]
    if missing != "tokenizer.json" or not others:
        return "give a complete Hugging Face directory"
    return (
        f"it has {others[0]}, which is not read here. Use a release of the model with tokenizer.json, or convert the "
        "tokenizer (AutoTokenizer.from_pretrained and save_pretrained of transformers) and check that its ids stay"
    )


def _require_whole_weights(model: Path) -> None:
    """Raise ConfigError if weights are missing or cut off, by the headers of safetensors files alone."""
    index = read_model_json(model, _INDEX, required=False).get("weight_map")
    names = {str(name) for name in index.values()} if isinstance(index, dict) else set()
    for name in sorted(names or {path.name for path in model.glob("*.safetensors")}):
        path = model / name
        if not path.is_file():
            source = f", which {_INDEX} names" if names else ": it is a link to a file that is missing"
            raise ConfigError(f"model directory {model} lacks {name}{source}; download the model again")
        if (reason := _why_not_whole(path)) is not None:
            raise ConfigError(f"{path} {reason}; download it again")


def _why_not_whole(path: Path) -> str | None:
    """Return why a safetensors file is not whole: 8 bytes with the header's length, the header, the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER.encode():
            return "is a pointer of Git LFS, not the file"
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > size - 8:
            return f"has {size} bytes, less than its header"
        if length > _MAX_HEADER_BYTES:
            return "is no safetensors file"
        file.seek(8)
        header = file.read(length)
    try:
        ends = [one["data_offsets"][1] for name, one in json.loads(header).items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "is no safetensors file"
    return f"has {size} bytes of {expected}" if size < expected else None
