"""The `qwen_code` harness: Qwen Code, unmodified, without a terminal, with the adapter as its OpenAI-like provider."""

import json
import re
from typing import Any

from activities.harnesses.base import HarnessSpec, Transcript, json_lines, token_counts
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.fetched_harness import EventsHarness
from ratchet.types import AgentExit
from store.tool_uses import object_of

_COMMAND = """\
export OPENAI_API_KEY="$RATCHET_SESSION_TOKEN"
unset RATCHET_SESSION_TOKEN
mkdir -p "$HOME/.qwen"
cp settings.json "$HOME/.qwen/settings.json"
prompt=$PWD/prompt.txt
cd {workdir} || exit 1
exec {program} --auth-type openai --yolo --output-format stream-json {arguments} <"$prompt"
"""
_CALL_MILLISECONDS = 900_000
"""An adapter may hold a call for as long as an engine or the store is away; a call that was given up is repeated."""
# Ends that the policy's answers cause: it repeats a call, or says nothing.
_OWN_END = re.compile(
    r"loop detection|empty response text|without visible progress|leaked protocol tags", re.IGNORECASE
)
# How the program marks the error of a model call, and its own limit of turns.
_MODEL_CALL_FAILURE = re.compile(r"\[API Error|max session turns|connection error|fetch failed", re.IGNORECASE)


class QwenCode(EventsHarness):
    """Qwen Code; its transcript is the program's JSON events."""

    name = "qwen_code"
    dialect = "chat"

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{spec.adapter_base_url}/v1",
            "OPENAI_MODEL": spec.model_name,
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            **spec.extra_env,
        }

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        generation: dict[str, Any] = {"timeout": _CALL_MILLISECONDS, "maxRetries": 10}
        if spec.max_context_tokens is not None:  # it compresses a conversation before the context is full
            generation["contextWindowSize"] = spec.max_context_tokens
        if spec.max_response_tokens is not None:
            generation["samplingParams"] = {"max_tokens": spec.max_response_tokens}
        settings = {
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            # Calls of its own beside the task, whose result only later conversations of a person would use.
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
            "model": {"name": spec.model_name, "maxSessionTurns": spec.max_turns or -1, "generationConfig": generation},
        }
        return {**self.program_files(_COMMAND, spec), "settings.json": json.dumps(settings).encode()}

    @staticmethod
    def exit_of_events(events: list[dict[str, Any]], exit_code: int) -> AgentExit:
        """Read the exit from the last `result` event; a program without one has crashed."""
        result = next((event for event in reversed(events) if event.get("type") == "result"), None)
        if result is None:
            return AgentExit.CRASHED
        if not result.get("is_error"):
            return AgentExit.DONE
        error = json.dumps(result.get("error"))
        if _OWN_END.search(error) or not _MODEL_CALL_FAILURE.search(error):
            return AgentExit.CRASHED
        # The program repeats the error as an answer of its model, so an answer counts only if it called a tool.
        answered = any(part.get("type") == "tool_use" for event in events for part in _content_of(event))
        return exit_of_error(error, answered)

    def read_transcript(self, data: bytes) -> Transcript:
        events = json_lines(data)
        steps = sum(part.get("type") == "tool_use" for event in events for part in _content_of(event))
        results = [event for event in events if event.get("type") == "result"]
        return Transcript(
            data,
            num_turns=sum(event.get("type") == "assistant" for event in events),
            num_steps=steps,
            usage=token_counts(*(one.get("usage") for one in results[-1:])),
        )


def _content_of(event: dict[str, Any]) -> list[dict[str, Any]]:
    content = object_of(event.get("message")).get("content") if event.get("type") == "assistant" else None
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
