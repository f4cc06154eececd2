"""The `codex` harness: OpenAI's CLI, unmodified, in `exec` mode, with the adapter as its model provider."""

import json
from typing import Any

from activities.harnesses.base import HarnessSpec, Transcript, json_lines, token_counts
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.fetched_harness import EventsHarness
from ratchet.types import AgentExit

_COMMAND = """\
mkdir -p "$HOME/.codex"
cp config.toml "$HOME/.codex/config.toml"
prompt=$PWD/prompt.txt
cd {workdir} || exit 1
exec {program} exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox {arguments} - <"$prompt"
"""
# Codex's own sandbox is off: it needs namespaces that the agent's user may not create, and the box is the sandbox.
_CONFIG = """\
model = {model}
model_provider = "ratchet"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.ratchet]
name = "ratchet"
base_url = {base_url}
wire_api = "responses"
env_key = "RATCHET_SESSION_TOKEN"
request_max_retries = 10
stream_max_retries = 10
stream_idle_timeout_ms = 900000

[analytics]
enabled = false
"""


class Codex(EventsHarness):
    """Codex; its transcript is the CLI's JSON events."""

    name = "codex"
    dialect = "responses"

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        # A JSON string is a valid TOML string.
        config = _CONFIG.format(model=json.dumps(spec.model_name), base_url=json.dumps(f"{spec.adapter_base_url}/v1"))
        if spec.max_context_tokens is not None:
            config = f"model_context_window = {spec.max_context_tokens}\n" + config
        return {**self.program_files(_COMMAND, spec), "config.toml": config.encode()}

    @staticmethod
    def exit_of_events(events: list[dict[str, Any]], exit_code: int) -> AgentExit:
        """Read the exit from the last `turn.completed` or `turn.failed` event; a program without either has crashed."""
        for event in reversed(events):
            if event.get("type") == "turn.completed":
                return AgentExit.DONE
            if event.get("type") == "turn.failed":
                return exit_of_error(json.dumps(event.get("error")), any(_is_answer(one) for one in events))
        return AgentExit.CRASHED

    def read_transcript(self, data: bytes) -> Transcript:
        events = json_lines(data)
        kinds = [
            event["item"].get("type")
            for event in events
            if event.get("type") == "item.completed" and isinstance(event.get("item"), dict)
        ]
        usage = token_counts(*(event.get("usage") for event in events if event.get("type") == "turn.completed"))
        steps = sum(kind in ("command_execution", "file_change", "mcp_tool_call") for kind in kinds)
        return Transcript(data, num_turns=kinds.count("agent_message"), num_steps=steps, usage=usage)


def _is_answer(event: dict[str, Any]) -> bool:
    """Return whether the event is an item of the model; the CLI reports its own errors as items of type `error`."""
    item = event.get("item")
    return event.get("type") == "item.completed" and isinstance(item, dict) and item.get("type") != "error"
