"""The `bash_agent` harness, the default: upload `agent.py` with its config and read its exit codes.

It needs nothing in the image but a shell, bash and a Python.
"""

import hashlib
import json
from importlib import resources

from pydantic import BaseModel, ConfigDict, Field

from activities.harnesses.base import BaseHarness, HarnessSpec, Transcript, exports, json_lines, token_counts
from activities.harnesses.bash_agent import agent
from ratchet.types import AgentExit
from sandboxes.base import Sandbox

# Short, because the context of a small policy is small.
DEFAULT_SYSTEM_PROMPT = (
    "You are a coding agent. Use the tool bash to read and edit files. When the work is done, say so."
)

# -I: import nothing from the working directory or the user's environment; -S: do not scan site-packages.
COMMAND = """\
python=/opt/ratchet/bin/python3
[ -x "$python" ] || python=python3
exec "$python" -I -S agent.py config.json
"""

EXIT_KINDS = {
    agent.EXIT_DONE: AgentExit.DONE,
    agent.EXIT_TURN_LIMIT: AgentExit.TURN_LIMIT,
    agent.EXIT_CONTEXT_FULL: AgentExit.CONTEXT_FULL,
    agent.EXIT_STARVED: AgentExit.STARVED,
    agent.EXIT_REFUSED: AgentExit.CRASHED,
}


class BashAgentOptions(BaseModel):
    """`HarnessSpec.extra` of this harness."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system_prompt: str = DEFAULT_SYSTEM_PROMPT
    output_limit_bytes: int = Field(default=16_384, ge=2)
    """Largest output of one command that the model sees, in bytes; the middle of a longer one is left out."""
    request_timeout_seconds: float = Field(default=900, gt=0)
    """Time in seconds without an answer after which a model call is repeated; the repetition joins the one in
    flight."""
    outage_seconds: float = Field(default=1800, ge=0)
    """Time in seconds for which a model call is repeated before the agent ends as starved; it counts against the
    budget."""


class BashAgent(BaseHarness):
    """The bash agent. It needs no `install`: the program is a few kilobytes and is part of the bundle of `start`."""

    name = "bash_agent"
    dialect = "chat"
    options = BashAgentOptions

    @property
    def version(self) -> str:
        return hashlib.sha256(program()).hexdigest()[:12]

    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        options = BashAgentOptions.model_validate(spec.extra)
        config = {
            "base_url": spec.adapter_base_url,
            "model": spec.model_name,
            "workdir": spec.workdir,
            "user_prompt": spec.prompt,
            "max_turns": spec.max_turns,
            "step_timeout_seconds": spec.step_timeout_seconds,
            **options.model_dump(),
        }
        command = exports(spec.extra_env) + COMMAND
        return {"command.sh": command.encode(), "agent.py": program(), "config.json": json.dumps(config).encode()}

    async def read_exit(self, box: Sandbox, attempt: int, exit_code: int, errors: str) -> AgentExit:
        return EXIT_KINDS.get(exit_code, AgentExit.CRASHED)

    def read_transcript(self, data: bytes) -> Transcript:
        events = json_lines(data)
        kinds = [event.get("event") for event in events]
        usage = token_counts(*(event.get("usage") for event in events))
        return Transcript(data, num_turns=kinds.count("turn"), num_steps=kinds.count("step"), usage=usage)


def program() -> bytes:
    """Return the source of `agent.py`; its sha256 is the recorded version."""
    return resources.files("activities.harnesses.bash_agent").joinpath("agent.py").read_bytes()
