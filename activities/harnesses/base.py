"""The contract of a harness: how an agent program is installed, started, awaited, collected and ended in a box.

The agent stage works with any program through it. A harness is one file or folder here, named in `registry.py`; it
knows boxes but not Temporal.
"""

import contextlib
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from activities.harnesses import launcher
from activities.harnesses.launcher import StartResult
from ratchet.errors import ConfigError
from ratchet.types import AgentExit
from sandboxes.base import Sandbox
from store.tool_uses import object_of

WireProtocol = Literal["messages", "chat", "responses"]

MAX_TRANSCRIPT_BYTES = 16 << 20
_SAME_ORDER = "export PYTHONHASHSEED=${PYTHONHASHSEED-0}\n"  # a replayed command prints sets as it did before

DEFAULT_PROMPT = """\
Fix the issue below in the repository at {workdir}, which is your working directory.

<issue>
{problem_statement}
</issue>

Read the code first and find the cause. Change the source code, not the tests; keep the change small and in the style \
of the
code around it. Check it by running the code or its tests. Hidden tests decide whether the issue is solved. Leave your \
changes
in the working directory; there is no need to commit."""


class HarnessSpec(BaseModel):
    """One agent's task and limits, without the session token, which is a secret.

    `adapter_base_url`: the adapter as the box reaches it, without `/v1`. `prompt`: the final user message (see
    `render_prompt`). `time_budget_seconds`: counted by the box's clock, by the launcher; time in which the
    agent waits for us is added by `launcher.extend_deadline`. `max_turns`, `step_timeout_seconds`: None for no limit
    beside that budget. `extra`: the harness's own options, which it validates itself.
    `extra_args`: appended to the program's command line, in shell syntax; None: the harness's own default.
    `extra_env`: overrides all other environment variables. `task_env`: the task's; all others override it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapter_base_url: str
    model_name: str
    workdir: str
    prompt: str
    max_turns: int | None = Field(ge=1)
    step_timeout_seconds: float | None = Field(gt=0)
    time_budget_seconds: float = Field(gt=0)
    agent_user: str = "agent"
    max_context_tokens: int | None = None
    max_response_tokens: int | None = None
    extra_args: str | None = None
    extra_env: Mapping[str, str] = Field(default_factory=dict)
    task_env: Mapping[str, str] = Field(default_factory=dict)
    extra: Mapping[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The end of the agent, or its suspension at its deadline.

    `exit_code` None: the launcher died, the agent was ended before its start, or `is_suspended`. `used_seconds`: by the
    box's clock, without `suspended_seconds`, the time for which the agent has been suspended, or was before it was
    ended. `is_suspended`: it has not ended; `launcher.resume_suspended` or `launcher.stop` decides, and then `wait` is
    called again. `is_cut`: the rollout's guard ended it before it was done, so its work is not graded.
    """

    kind: AgentExit
    exit_code: int | None
    used_seconds: float
    detail: str
    suspended_seconds: float = 0.0
    is_suspended: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Transcript:
    """The program's own output. Its counts are the program's claims; the turns that count are those in the store."""

    data: bytes
    num_turns: int
    num_steps: int
    usage: Mapping[str, int] = field(default_factory=dict)
    """Token counts by the program, under its own names."""


class NoOptions(BaseModel):
    """`HarnessSpec.extra` of a harness without options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BaseHarness(ABC):
    """One agent program. A subclass defines its files (`configure`) and its transcript, and its exit (`read_exit`) if
    the exit code does not tell it.

    The launcher starts the program once, waits for it, suspends it at the deadline and ends it, for all in the same
    way. Every method may be called again, by another try or process, also after success. `attempt` identifies the
    agent's run within the box. All methods raise SandboxGoneError and SandboxBusyError as the box does.
    """

    name: ClassVar[str]
    dialect: ClassVar[WireProtocol]
    """Wire protocol between the program and the adapter."""
    options: ClassVar[type[BaseModel]] = NoOptions
    """Model that validates `HarnessSpec.extra`."""

    @property
    @abstractmethod
    def version(self) -> str:
        """The program's version, as recorded with every attempt."""

    @abstractmethod
    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        """Return the files for the agent: `command.sh`, which /bin/sh runs as the agent's user, and its inputs.

        They lie in one folder, the command's working directory, which the agent can read but not write. The session
        token is in the environment variable RATCHET_SESSION_TOKEN.
        """

    def files(self, spec: HarnessSpec) -> dict[str, bytes]:
        """Return the files of `configure`; `command.sh` begins with the task's variables, which it may set anew."""
        made = self.configure(spec)
        return {**made, "command.sh": (_SAME_ORDER + exports(spec.task_env)).encode() + made["command.sh"]}

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        """Return the environment variables beside the token and the box's own; `spec.extra_env` overrides."""
        return {**spec.extra_env}

    def check(self, extra: Mapping[str, JsonValue]) -> None:
        """Raise ConfigError for options that this harness does not know; called when a run starts."""
        try:
            self.options.model_validate(extra)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ConfigError(f"harness {self.name}: {problems}") from None

    async def install(self, box: Sandbox, spec: HarnessSpec) -> None:  # noqa: B027
        """Put the program into the box if the image does not have it."""

    async def start(self, box: Sandbox, spec: HarnessSpec, attempt: int, token: str) -> StartResult:
        """Start the agent detached, unless this attempt was started before. Raises CommandFailedError if it cannot."""
        return await launcher.start_once(
            box, self.files(spec), token, attempt=attempt, user=spec.agent_user, budget_seconds=spec.time_budget_seconds
        )

    async def wait(self, box: Sandbox, attempt: int) -> ExitReport:
        """Wait by one long command until the agent has ended or is suspended; cancelling does not end the agent."""
        record, errors = await launcher.wait_for_exit(box, attempt)
        if record.reason in ("reached", "deadline", "stalled", "guard"):
            kind = AgentExit.TIME_BUDGET
        elif record.reason == "exit" and record.exit_code is not None:
            kind = await self.read_exit(box, attempt, record.exit_code, errors)
        else:
            kind = AgentExit.CRASHED
        return ExitReport(
            kind,
            record.exit_code,
            record.used_seconds,
            errors or record.reason,
            suspended_seconds=max(0.0, record.ended - record.started - record.used_seconds),
            is_suspended=record.reason == "reached",
            is_cut=record.reason == "guard",
        )

    async def read_exit(self, box: Sandbox, attempt: int, exit_code: int, errors: str) -> AgentExit:
        """Return the exit of a program that ended by itself. `errors`: the last lines of its standard error."""
        return AgentExit.DONE if exit_code == 0 else AgentExit.CRASHED

    async def collect(self, box: Sandbox, attempt: int) -> Transcript:
        """Read the transcript, at most MAX_TRANSCRIPT_BYTES; empty if there is none. Works while the agent runs."""
        return self.read_transcript(await launcher.read_output(box, attempt, MAX_TRANSCRIPT_BYTES))

    @abstractmethod
    def read_transcript(self, data: bytes) -> Transcript:
        """Count the turns and steps in the program's output; an incomplete last line is ignored."""


def exports(environment: Mapping[str, str]) -> str:
    """Return shell lines that export the variables, for the top of a `command.sh`."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def json_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines; other lines, and an incomplete last one, are skipped."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


def token_counts(*usages: Any) -> dict[str, int]:
    """Add up the numbers that a program gives under its own names, and leave out its other values."""
    counts: Counter[str] = Counter()
    for usage in usages:
        counts.update({name: value for name, value in object_of(usage).items() if isinstance(value, int)})
    return dict(counts)


def render_prompt(template: str, problem_statement: str, workdir: str) -> str:
    """Replace `{problem_statement}` and `{workdir}`; other braces, also within the values, stay unchanged."""
    values = {"problem_statement": problem_statement, "workdir": workdir}
    return re.sub(r"\{(problem_statement|workdir)\}", lambda match: values[match[1]], template)
