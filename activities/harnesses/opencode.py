"""The `opencode` harness: OpenCode, unmodified, in `run` mode, with the adapter as an OpenAI-compatible provider."""

import json
from typing import Any

from activities.harnesses.base import HarnessSpec, Transcript, json_lines, token_counts
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.fetched_harness import EventsHarness
from ratchet.types import AgentExit
from store.tool_uses import object_of

# The prompt comes by standard input, because the program puts quotes around an argument of several words.
_COMMAND = """\
export OPENCODE_CONFIG=$PWD/opencode.json
prompt=$PWD/prompt.txt
cd {workdir} || exit 1
exec {program} run --format json --auto --title task {arguments} <"$prompt"
"""
_CONTEXT_TOKENS = 1_000_000
_RESPONSE_TOKENS = 32_000


class OpenCode(EventsHarness):
    """OpenCode; its transcript is the program's JSON events."""

    name = "opencode"
    dialect = "chat"

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        # Without these it asks the internet for updates, prices, language servers and plug-ins.
        switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return {**{f"OPENCODE_DISABLE_{one}": "1" for one in switches}, **spec.extra_env}

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        # It compacts a conversation before the context is full, so it is told the true size.
        limit = {
            "context": spec.max_context_tokens or _CONTEXT_TOKENS,
            "output": spec.max_response_tokens or _RESPONSE_TOKENS,
        }
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "ratchet",
            "options": {"baseURL": f"{spec.adapter_base_url}/v1", "apiKey": "{env:RATCHET_SESSION_TOKEN}"},
            "models": {spec.model_name: {"name": spec.model_name, "limit": limit}},
        }
        config: dict[str, Any] = {
            "provider": {"ratchet": provider},
            "enabled_providers": ["ratchet"],
            "model": f"ratchet/{spec.model_name}",
            "small_model": f"ratchet/{spec.model_name}",
            "agent": {"build": {"steps": spec.max_turns} if spec.max_turns else {}},
            "autoupdate": False,
            "share": "disabled",
            "lsp": False,
            "formatter": False,
        }
        return {**self.program_files(_COMMAND, spec), "opencode.json": json.dumps(config).encode()}

    @staticmethod
    def exit_of_events(events: list[dict[str, Any]], exit_code: int) -> AgentExit:
        """Read the exit from the last event: an error, or the end of a step that asked for no more tools."""
        if not events:
            return AgentExit.CRASHED
        last = events[-1]
        if last.get("type") == "error":
            answered = any(event.get("type") in ("text", "tool_use") for event in events)
            return exit_of_error(json.dumps(last.get("error")), answered)
        if last.get("type") == "step_finish" and object_of(last.get("part")).get("reason") != "tool-calls":
            return AgentExit.DONE
        return AgentExit.CRASHED

    def read_transcript(self, data: bytes) -> Transcript:
        events = json_lines(data)
        kinds = [event.get("type") for event in events]
        parts = [object_of(event.get("part")) for event in events if event.get("type") == "step_finish"]
        usage = token_counts(*(part.get("tokens") for part in parts))
        return Transcript(data, num_turns=kinds.count("step_finish"), num_steps=kinds.count("tool_use"), usage=usage)
