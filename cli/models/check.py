"""`ratchet models check`: whether a model directory can be served, captured exactly and trained here."""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import print_json
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.config import LoraConfig, SamplingConfig
from ratchet.errors import ConfigError
from ratchet.model_directory import require_model

if TYPE_CHECKING:
    from adapter.prompt.parser_choice import FittingParser
    from adapter.prompt.renderer import Renderer
    from training.model_facts import ModelFacts, ModelSizes

_GPUS = (1, 8, 64)
_CACHED_TOKENS = 1_000_000
_NAME_WIDTH = 12
_WITH_TOOLS = {
    "<|im_start|>": "Qwen2.5's, which engine.tool_parser: hermes reads",
    "<|start_header_id|>": "Llama 3.1's, which engine.tool_parser: llama3_json reads",
    "[INST]": "Mistral 7B v0.3's, which engine.tool_parser: mistral reads",
}
"""Templates with tools, by a control token that a model must have for it."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """One line of the report. `is_problem`: the model cannot be used as it is."""

    name: str
    text: str
    is_problem: bool = False


def check(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face model directory.")],
    bin_tokens: Annotated[
        int, typer.Option(min=1, max=LARGEST_INTEGER, help="Tokens of one forward pass, for the memory.")
    ] = 32_768,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say whether a model can be served, captured exactly and trained, and which settings fit it.

    Takes up to a minute, most of it for vLLM's import. Reads no weights. Exit code 1 if the model cannot be used.
    """
    require_model(directory)
    warnings.simplefilter("ignore")  # those of libraries are about serving and not about the model
    logging.disable(logging.WARNING)
    findings = [*_serving(directory), *_training(directory, bin_tokens)]
    if json:
        print_json({one.name: {"text": one.text, "problem": one.is_problem} for one in findings})
    else:
        print("\n".join(_paragraph(one) for one in findings))
    if any(one.is_problem for one in findings):
        raise typer.Exit(1)


def _paragraph(finding: _Finding) -> str:
    text = f"NO: {finding.text}" if finding.is_problem else finding.text
    indent = " " * _NAME_WIDTH
    width = max(60, get_terminal_size().columns)
    return fill(text, width, initial_indent=finding.name.ljust(_NAME_WIDTH), subsequent_indent=indent)


def _serving(directory: Path) -> list[_Finding]:
    from adapter.prompt.renderer import Renderer

    try:
        renderer = Renderer(directory)
    except ConfigError as error:
        return [_Finding("capture", str(error), is_problem=True)]
    reason = renderer.full_render_reason
    cost = (
        "a turn costs its new text"
        if reason is None
        else f"every prompt is rendered and tokenised in full, because {reason}"
    )
    shows = renderer.template.shows_reasoning
    drops = renderer.segments is not None and renderer.segments.drops_thinking
    thinking = (
        "the template shows no thinking"
        if not shows
        else "the template leaves earlier thinking out after a new question, which starts a new chain"
        if drops
        else "the template keeps thinking"
    )
    return [_Finding("capture", f"exact; {cost}"), _Finding("history", thinking), *_parsers(renderer)]


def _parsers(renderer: "Renderer") -> list[_Finding]:
    from adapter.prompt.parser_choice import fitting_parsers

    try:
        found = fitting_parsers(renderer)
    except ConfigError as error:
        return [_Finding("parsers", f"not tried: {error}")]
    if found.tools is None:
        related = next((value for mark, value in _WITH_TOOLS.items() if mark in renderer.tokenizer.alias), None)
        text = (
            "the template shows no tool calls, so agents cannot use tools; put one that does into chat_template.jinja, "
            f"such as {related or 'that of a related model with the same control tokens'}, and run this command again"
        )
        tools = _Finding("tool calls", text, is_problem=True)
    elif not found.tools:
        tools = _Finding(
            "tool calls", "no parser of vLLM reads the calls that the template writes; see docs/models.md", True
        )
    else:
        tools = _Finding("tool calls", f"engine.tool_parser: {_names(found.tools, 'for one call of an answer')}")
    if found.thinking is None:
        thinking = _Finding("thinking", "engine.reasoning_parser: null")
    elif not found.thinking:
        thinking = _Finding("thinking", "no parser of vLLM separates thinking; agents see it as text")
    else:
        thinking = _Finding("thinking", f"engine.reasoning_parser: {_names(found.thinking, 'if every answer thinks')}")
    return [tools, thinking]


def _names(parsers: "Sequence[FittingParser]", condition: str) -> str:
    complete = " or ".join(parser.name for parser in parsers if parser.complete)
    others = " or ".join(parser.name for parser in parsers if not parser.complete)
    return "; ".join(part for part in (complete, others and f"{condition} {others}") if part)


def _training(directory: Path, bin_tokens: int) -> list[_Finding]:
    from training.model_facts import ModelFacts

    try:
        facts = ModelFacts.read(directory)
        sizes = facts.sizes
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [_Finding("training", f"transformers makes no causal language model of this config: {reason}", True)]
    packing = (
        "training.packing: tree; equal prefixes are computed once"
        if sizes.no_segments is None
        else f"training.packing: padded; {sizes.no_segments}"
    )
    return [
        _Finding("model", _description(sizes)),
        _serves(sizes),
        _Finding("training", packing + _trained(sizes))
        if sizes.quantised is None
        else _Finding("training", sizes.quantised, is_problem=True),
        *_notes(directory, facts),
        *_memory(facts, bin_tokens),
    ]


def _description(sizes: "ModelSizes") -> str:
    active = "" if sizes.active == sizes.weights else f", of which a token passes {_count(sizes.active)}"
    images = "; text only: images are named in the prompt, not shown" if sizes.has_vision else ""
    return f"{sizes.architecture}, {_count(sizes.weights)} weights{active}, {sizes.layers} layers{images}"


def _trained(sizes: "ModelSizes") -> str:
    if sizes.served == sizes.weights:
        return ""
    others = _count(sizes.served - sizes.weights)
    return f"; trained: the text layers; the vision tower, {others} weights, is published as it is"


def _notes(directory: Path, facts: "ModelFacts") -> Iterator[_Finding]:
    """Yield what is missing, and what limits chains or lets experts be replayed."""
    sizes = facts.sizes
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        yield _Finding("weights", "none in this directory; download them before a run")
    known = getattr(facts.settings.get_text_config(), "max_position_embeddings", None)
    default = SamplingConfig().max_context_tokens
    if known and known < default:
        yield _Finding("context", f"sampling.max_context_tokens: at most {known:,} for this model, not {default:,}")
    if sizes.positions is not None:
        kind, limit = sizes.positions
        text = f"at most {limit} in training, since rotary positions ({kind}) of longer chains"
        yield _Finding("positions", f"sampling.max_context_tokens: {text} depend on the other chains of a pass")
    if sizes.expert_bytes:
        text = f"true can be used; {sizes.expert_bytes} bytes per token until a turn is trained"
        text = text if sizes.no_replay is None else f"false; {sizes.no_replay}"
        yield _Finding("routing", f"training.router_replay: {text}")


def _count(weights: int) -> str:
    return f"{weights / 1e9:.1f} billion" if weights >= 1e8 else f"{weights / 1e6:.1f} million"


def _serves(sizes: "ModelSizes") -> _Finding:
    try:
        from vllm import ModelRegistry, __version__
    except ImportError as error:
        return _Finding("serving", f"not tried: vLLM is not installed here ({error})")
    if sizes.has_vision and find_spec("torchvision") is None:
        text = f"vLLM {__version__} needs torchvision to serve {sizes.architecture}; install the release for this torch"
        return _Finding("serving", text, is_problem=True)
    known = sizes.architecture in ModelRegistry.get_supported_archs()
    return _Finding(
        "serving", f"vLLM {__version__} {'serves' if known else 'does not serve'} {sizes.architecture}", not known
    )


def _memory(facts: "ModelFacts", bin_tokens: int) -> list[_Finding]:
    from training.memory_estimate import engine_gib, learner_gib

    sizes = facts.sizes
    learner = ", ".join(f"{learner_gib(sizes, ranks, bin_tokens):.1f} on {ranks}" for ranks in _GPUS)
    with contextlib.suppress(ValueError):  # its layers have other names than those that adapters have by default
        adapted = learner_gib(sizes, 1, bin_tokens, adapter_weights=facts.adapter_weights(LoraConfig()))
        learner += f"; with training.lora: {adapted:.1f} on 1"
    engine = ", ".join(f"{engine_gib(sizes, gpus, _CACHED_TOKENS):.1f} on {gpus}" for gpus in (1, 8))
    return [
        _Finding("learner", f"estimated GiB per GPU with bins of {bin_tokens:,} tokens: {learner}"),
        _Finding("engine", f"estimated GiB per GPU with {_CACHED_TOKENS:,} cached tokens: {engine}"),
    ]
