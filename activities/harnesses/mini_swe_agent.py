"""The `mini_swe_agent` harness: SWE-agent's small agent from PyPI, with its own command line and prompts.

It speaks Chat Completions through litellm, and is an example of a Python agent that was not written for this program.
"""

import json
import re
from typing import Any

from activities.harnesses.base import HarnessSpec, Transcript
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.fetched_harness import FetchedHarness
from ratchet.types import AgentExit
from sandboxes.base import Sandbox

# Its output is for people; the transcript is the trajectory, which it saves after every step.
_COMMAND = """\
export OPENAI_API_KEY="$RATCHET_SESSION_TOKEN"
unset RATCHET_SESSION_TOKEN
export MSWEA_GLOBAL_CONFIG_DIR="$HOME/.mini-swe-agent"
mkdir -p "$MSWEA_GLOBAL_CONFIG_DIR"
overrides=$PWD/overrides.yaml task=$(cat prompt.txt)
cd {workdir} || exit 1
{program} -y --exit-immediately --agent-class default -c mini.yaml -c "$overrides" -t "$task" \\
  -o "$MSWEA_GLOBAL_CONFIG_DIR/trajectory.json" {arguments} >&2
code=$?
cat "$MSWEA_GLOBAL_CONFIG_DIR/trajectory.json"
grep -m1 -o '"role": "assistant"' "$MSWEA_GLOBAL_CONFIG_DIR/trajectory.json" >&2
grep -m1 -o '"exit_status": "[A-Za-z]*"' "$MSWEA_GLOBAL_CONFIG_DIR/trajectory.json" >&2
exit $code
"""
_EXIT_STATUS = re.compile(r'"exit_status": "(\w+)"')
# litellm's names of failed model calls; any other exception is the program's own.
_MODEL_CALL_FAILURES = (
    "APIConnectionError", "APIError", "AuthenticationError", "BadRequestError", "ContextWindowExceededError",
    "InternalServerError", "LimitsExceeded", "NotFoundError", "PermissionDeniedError", "RateLimitError",
    "ServiceUnavailableError", "Timeout",
)  # fmt: skip


class MiniSweAgent(FetchedHarness):
    """mini-swe-agent; its transcript is the trajectory file."""

    name = "mini_swe_agent"
    dialect = "chat"

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        return {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it fetches a price list from the internet
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **spec.extra_env,
        }

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        seconds = spec.step_timeout_seconds or spec.time_budget_seconds
        overrides: dict[str, Any] = {
            "agent": {"step_limit": spec.max_turns or 0, "cost_limit": 0},
            "environment": {"cwd": spec.workdir, "timeout": int(seconds)},
            "model": {
                "model_name": f"openai/{spec.model_name}",
                "model_class": "litellm",
                "model_kwargs": {"api_base": f"{spec.adapter_base_url}/v1", "timeout": 900},
            },
        }
        return {**self.program_files(_COMMAND, spec), "overrides.yaml": json.dumps(overrides).encode()}  # JSON is YAML

    async def read_exit(self, box: Sandbox, attempt: int, exit_code: int, errors: str) -> AgentExit:
        return read_mini_swe_agent_exit(errors)

    def read_transcript(self, data: bytes) -> Transcript:
        try:
            messages = json.loads(data)["messages"]
        except (ValueError, KeyError, TypeError):  # it is printed completely at the end, or not at all
            messages = []
        steps = sum(len((message.get("extra") or {}).get("actions") or []) for message in messages)
        return Transcript(
            data, num_turns=sum(message.get("role") == "assistant" for message in messages), num_steps=steps
        )


def read_mini_swe_agent_exit(errors: str) -> AgentExit:
    """Read the exit from what `command.sh` prints last: if there was an answer, and the trajectory's status."""
    found = _EXIT_STATUS.findall(errors)
    status = found[-1] if found else ""
    if status == "Submitted":
        return AgentExit.DONE
    if status not in _MODEL_CALL_FAILURES:
        return AgentExit.CRASHED
    words = errors.rpartition("litellm.")[2]  # before it stands what the policy printed
    return exit_of_error(words, answered='"role": "assistant"' in words)
