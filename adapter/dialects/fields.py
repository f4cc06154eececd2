"""The treatment of each top-level field of a request: honoured, refused, or accepted without effect.

An agent must not believe that a field was honoured which was not. A field that is refused has an error that names it,
unless its value asks for nothing; a field without effect changes neither the answer's meaning nor who does what. Fields
that are not listed are refused, as the vendors do. `docs/reference/fields.md` has the table, and a test compares
it with the SDKs' own types, so that a new field fails a test.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from adapter.dialects.base import Fields, InvalidRequestError, StateNotKeptError


class Support(StrEnum):
    HONOURED = "honoured"
    REFUSED = "refused"
    NO_EFFECT = "no effect"


class FieldRule(NamedTuple):
    """`note`: for a refused field, what to do instead. `harmless`: values of it that ask for nothing. `is_state`: it
    refers to a conversation that the vendor's servers keep."""

    support: Support
    note: str = ""
    harmless: tuple[Any, ...] = ()
    is_state: bool = False


def _honoured(note: str = "") -> FieldRule:
    return FieldRule(Support.HONOURED, note)


def _refused(note: str, *harmless: Any) -> FieldRule:
    return FieldRule(Support.REFUSED, note, (None, *harmless))


def _state(note: str, *harmless: Any) -> FieldRule:
    return FieldRule(Support.REFUSED, note, (None, *harmless), is_state=True)


_RUN_SAMPLES = FieldRule(Support.NO_EFFECT, "sampling is set by the run")
_ACCOUNT = FieldRule(Support.NO_EFFECT, "concerns the vendor's accounts, caches or prices")
_HINT = FieldRule(Support.NO_EFFECT, "a hint, which changes no answer")
_XAI = FieldRule(Support.NO_EFFECT, "of xAI's own tools; grok-cli sends it with each call")
_WHOLE_HISTORY = "no conversation is kept here: send the whole history"
_SAMPLED_ONLY = "only the sampled token's logprob is recorded: send 0"

_OPENAI_SAMPLING = (  # with those of open servers
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "chat_template_kwargs",
)  # fmt: skip
_OPENAI_ACCOUNT = (
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "user", "access_programs", "client_metadata",
)  # fmt: skip
_MESSAGES_ACCOUNT = (
    "betas", "billing_policy", "cache_control", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo",
    "metadata", "service_tier", "speed", "user_profile_id", "workspace_id",
)  # fmt: skip

_OPENAI: dict[str, FieldRule] = {
    "model": _honoured("the session's model only"),
    "parallel_tool_calls": _honoured("false: only the first call reaches the client"),
    "stream": _honoured(),
    "tool_choice": _honoured("calls of tools that are not chosen stay text; no value forces a call"),
    "tools": _honoured("functions, custom tools; grammars of custom tools have no effect"),
    "top_logprobs": _refused(_SAMPLED_ONLY, 0),
    **dict.fromkeys(_OPENAI_SAMPLING, _RUN_SAMPLES),
    **dict.fromkeys(_OPENAI_ACCOUNT, _ACCOUNT),
}

CHAT_FIELDS: dict[str, FieldRule] = _OPENAI | {
    "messages": _honoured("images and files are placeholders"),
    "max_tokens": _honoured("only shortens"),
    "max_completion_tokens": _honoured("only shortens"),
    "n": _refused("only 1 is served", 1),
    "stop": _honoured("the output ends with the token that completes one"),
    "stream_options": _honoured("`include_usage`"),
    "logprobs": _honoured("of every sampled token: thinking and marks of tool calls included"),
    "response_format": _honoured("checked after sampling; `refusal` says if the answer violates it"),
    "reasoning_effort": _RUN_SAMPLES,
    "verbosity": _RUN_SAMPLES,
    "prediction": _HINT,
    "store": _state("no completion is kept: leave it out", False),
    "functions": _refused("use tools", []),
    "function_call": _refused("use tool_choice", "none", "auto"),
    "modalities": _refused("only text is made", ["text"], []),
    "audio": _refused("only text is made"),
    "web_search_options": _refused("there is no web search"),
    **dict.fromkeys(("search_parameters", "max_turns", "include"), _XAI),
}

RESPONSES_FIELDS: dict[str, FieldRule] = _OPENAI | {
    "input": _honoured("images and files are placeholders"),
    "instructions": _honoured(),
    "max_output_tokens": _honoured("only shortens"),
    "include": _honoured("`reasoning.encrypted_content`, `message.output_text.logprobs`"),
    "text": _honoured("`format` is checked after sampling; a refusal part says if the answer violates it"),
    "stream_options": _HINT,
    "reasoning": _RUN_SAMPLES,
    "personality": _RUN_SAMPLES,
    "max_tool_calls": FieldRule(Support.NO_EFFECT, "limits tools that the vendor runs; there are none"),
    "truncation": FieldRule(Support.NO_EFFECT, "nothing is left out; the answer says `disabled`"),
    "background": _state("send the request without background", False),
    "conversation": _state(_WHOLE_HISTORY),
    "previous_response_id": _state(_WHOLE_HISTORY),
    "prompt": _state("no prompt is kept: send its text"),
    "store": _state("no response is kept: send false, or leave it out", False),
    "context_management": _refused("the history is not compacted here", []),
    "image": _refused("only text is made"),
}

MESSAGES_FIELDS: dict[str, FieldRule] = {
    "model": _honoured("the session's model only"),
    "messages": _honoured("images and files are placeholders"),
    "system": _honoured(),
    "tools": _honoured("tools with an `input_schema`"),
    "tool_choice": _honoured(
        "calls of tools that are not chosen stay text; `disable_parallel_tool_use`; no value forces a call"
    ),
    "max_tokens": _honoured("only shortens"),
    "stop_sequences": _honoured("the output ends with the token that completes one"),
    "stream": _honoured(),
    "output_config": _honoured("`format` is checked after sampling; the stop reason `refusal` says if it is violated"),
    "thinking": _RUN_SAMPLES,
    "context_management": _honoured("a compaction is refused; no other edit is applied"),
    "thread": _state(_WHOLE_HISTORY),
    "container": _refused("there are no containers: leave it out", {}),
    "mcp_servers": _refused("connect the agent itself to the server", []),
    "compaction": _refused("the history is not compacted here: compact it in the client"),
    **dict.fromkeys(("temperature", "top_p", "top_k"), _RUN_SAMPLES),
    **dict.fromkeys(_MESSAGES_ACCOUNT, _ACCOUNT),
}


def check_fields(rules: Mapping[str, FieldRule], fields: Fields) -> None:
    """Raise InvalidRequestError if the request has a field that is refused or unknown, with a value that matters."""
    for name, raw in fields.items():
        rule = rules.get(name)
        if rule is None:
            raise InvalidRequestError(f"{name[:100]}: this service does not know the field; leave it out")
        if rule.support is Support.REFUSED and (value := _value_of(name, raw)) not in rule.harmless:
            error = StateNotKeptError if rule.is_state else InvalidRequestError
            raise error(f"{name}: {rule.note}; got {str(value)[:100]!r}")


def _value_of(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:  # a number that no double can hold
        raise InvalidRequestError(f"{name}: {error}") from error
