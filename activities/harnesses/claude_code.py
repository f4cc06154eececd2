"""The `claude_code` harness: Anthropic's CLI, unmodified, in print mode, with the adapter as ANTHROPIC_BASE_URL."""

import json
import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict

from activities.harnesses.base import HarnessSpec, Transcript, json_lines
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.fetched_harness import EventsHarness
from ratchet.types import AgentExit
from store.tool_uses import object_of

_INVESTIGATOR = {
    "investigator": {
        "description": "Reads code to answer one question about it and reports; never changes a file."
        " Use it for anything that needs many files.",
        "prompt": "You answer one question about the code in the working directory. Read what you need, change nothing,"
        " and report what you found with file names and line numbers.",
        "tools": ["Read", "Grep", "Glob"],
    }
}
DEFAULT_EXTRA_ARGS = shlex.join(
    ["--agents", json.dumps(_INVESTIGATOR), "--disallowedTools", "WebFetch,WebSearch", "--disable-slash-commands"]
)
"""Arguments that are appended unless VIME_AGENT_CC_EXTRA_ARGS replaces them."""

# The prompt is passed by standard input: an argument is limited to 128 KiB, and a list flag would consume it.
_COMMAND = """\
export ANTHROPIC_AUTH_TOKEN="$RATCHET_SESSION_TOKEN"
unset RATCHET_SESSION_TOKEN
prompt=$PWD/prompt.txt
cd {workdir} || exit 1
exec {program} -p --output-format stream-json --verbose --dangerously-skip-permissions {arguments} <"$prompt"
"""


_BASH_LIMITS = ("BASH_DEFAULT_TIMEOUT_MS", "BASH_MAX_TIMEOUT_MS")
_COMPACT_AT_PERCENT = 80
"""Share, in percent, of the context beside an answer at which the CLI compacts, which leaves room for a tool result."""


class ClaudeCodeOptions(BaseModel):
    """`HarnessSpec.extra` of this harness."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_prompt: str | None = None
    """Text that is appended to the program's own system prompt."""


class ClaudeCode(EventsHarness):
    """Claude Code; its transcript is the CLI's stream-json output."""

    name = "claude_code"
    dialect = "messages"
    options = ClaudeCodeOptions

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        seconds = spec.step_timeout_seconds  # without it the CLI's own limits hold: two minutes, at most ten
        models = (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        )
        return {
            "ANTHROPIC_BASE_URL": spec.adapter_base_url,
            **dict.fromkeys((*models, "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), spec.model_name),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
            **({} if seconds is None else dict.fromkeys(_BASH_LIMITS, str(int(seconds * 1000)))),
            **_window(spec),
            **spec.extra_env,
        }

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        options = ClaudeCodeOptions.model_validate(spec.extra)
        arguments = ["--model", spec.model_name]
        arguments += ["--max-turns", str(spec.max_turns)] if spec.max_turns else []
        if options.system_prompt is not None:
            arguments += ["--append-system-prompt", options.system_prompt]
        arguments += shlex.split(DEFAULT_EXTRA_ARGS if spec.extra_args is None else spec.extra_args)
        return self.program_files(_COMMAND, spec, arguments)

    @staticmethod
    def exit_of_events(events: list[dict[str, Any]], exit_code: int) -> AgentExit:
        """Read the exit from the closing event; a program that ended without one has crashed."""
        result = next((event for event in reversed(events) if event.get("type") == "result"), None)
        if result is None:
            return AgentExit.CRASHED
        if result.get("subtype") == "error_max_turns":
            return AgentExit.TURN_LIMIT
        if result.get("is_error"):
            words = f"{result.get('subtype')} {result.get('result')} {result.get('errors')}"
            return exit_of_error(words, any(_is_answer(event) for event in events))
        return AgentExit.DONE

    def read_transcript(self, data: bytes) -> Transcript:
        events = json_lines(data)
        messages = [object_of(event.get("message")) for event in events if event.get("type") == "assistant"]
        blocks = [block for message in messages for block in message.get("content") or [] if isinstance(block, dict)]
        usage = next((event.get("usage") or {} for event in reversed(events) if event.get("type") == "result"), {})
        return Transcript(
            data,
            num_turns=len({message.get("id") for message in messages if message}),
            num_steps=sum(block.get("type") == "tool_use" for block in blocks),
            usage={name: value for name, value in usage.items() if isinstance(value, int)},
        )


def _window(spec: HarnessSpec) -> dict[str, str]:
    """Return the variables that tell the CLI the model's true context size; it assumes 200,000 tokens by default.

    It keeps CLAUDE_CODE_MAX_OUTPUT_TOKENS free for an answer, 20,000 at most; without that variable a window of 32k
    leaves no room. CLAUDE_CODE_AUTO_COMPACT_WINDOW is not used, because it refuses values below 100,000.
    """
    if spec.max_context_tokens is None:
        return {}
    window = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(spec.max_context_tokens),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": str(_COMPACT_AT_PERCENT),
    }
    if spec.max_response_tokens is not None:
        window["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(spec.max_response_tokens)
    return window


def _is_answer(event: dict[str, Any]) -> bool:
    """Return whether the event is the model's answer; the CLI reports its own errors as messages of `<synthetic>`."""
    message = event.get("message")
    return event.get("type") == "assistant" and isinstance(message, dict) and message.get("model") != "<synthetic>"
