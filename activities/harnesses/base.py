"""What a harness is: how an agent program is installed, started, awaited, collected and ended in a box.

Why here: the agent activity works with any harness through this contract; harnesses know boxes and nothing of Temporal.
Called by: `activities/agent.py` and `activities/diff.py`; implemented by one file or folder per agent, named in
`registry.py`. """

import contextlib
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from activities.harnesses import launcher
from activities.harnesses.launcher import StartResult
from activities.sandboxes.base import Sandbox
from ratchet.errors import ConfigError
from ratchet.types import AgentExit

WireProtocol = Literal["messages", "chat", "responses"]

MAX_TRANSCRIPT_BYTES = 16 << 20

DEFAULT_PROMPT = """\
Fix the issue below in the repository at {workdir}, which is your working directory.

<issue>
{problem_statement}
</issue>

Read the code first and find the cause. Change the source code, not the tests; keep the change small and in the style of the
code around it. Check it by running the code or its tests. Hidden tests decide whether the issue is solved. Leave your changes
in the working directory; there is no need to commit."""


class HarnessSpec(BaseModel):
    """One agent's task and limits. The session token is no part of it: it is a secret of its own.

    `adapter_base_url` is the adapter as the box reaches it, without `/v1`. `prompt` is the final text for the user's
    turn (see `render_prompt`). `time_budget_seconds` counts by the box's clock and is what the launcher enforces;
    seconds that the adapter spent waiting for an engine are given back by `BaseHarness.extend`. `extra` holds the
    harness's own options, which it validates itself: an unknown one is an error. `extra_args` are appended to the
    program's command line, in shell syntax; None: the harness's own default. `extra_env` is merged last into its
    environment. """

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapter_base_url: str
    model_name: str
    workdir: str
    prompt: str
    max_turns: int = Field(ge=1)
    step_timeout_seconds: float = Field(gt=0)
    time_budget_seconds: float = Field(gt=0)
    agent_user: str = "agent"
    max_context_tokens: int | None = None
    max_response_tokens: int | None = None
    extra_args: str | None = None
    extra_env: Mapping[str, str] = Field(default_factory=dict)
    extra: Mapping[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How the agent ended. `exit_code` None: the launcher died and nobody saw it. `used_seconds` is by the box's
    clock."""

    kind: AgentExit
    exit_code: int | None
    used_seconds: float
    detail: str


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the agent wrote down, as it wrote it. The facts are its own claims; turns that count are those in the
    store."""

    data: bytes
    num_turns: int
    num_steps: int
    usage: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the program's own count, under its own names."""


class NoOptions(BaseModel):
    """`HarnessSpec.extra` of a harness that has no options of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BaseHarness(ABC):
    """One agent program. A new one says what goes into the box (`configure`) and how its end is read (`read_exit`,
    `read_transcript`).

    Starting once, waiting, the deadline and the end are the launcher's and the same for all. Every method may be called
    again: by another try, in another process, after success. `attempt` names the agent's run within the box. All raise
    SandboxGoneError and SandboxBusyError as the box does. """

    name: ClassVar[str]
    dialect: ClassVar[WireProtocol]
    """The wire protocol that the program speaks with the adapter."""
    options: ClassVar[type[BaseModel]] = NoOptions
    """What `HarnessSpec.extra` may hold."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Of the program, as recorded with every attempt."""

    @abstractmethod
    def configure(self, spec: HarnessSpec) -> dict[str, bytes]:
        """The files beside the program: `command.sh`, which is run by /bin/sh as the agent's user, and what it reads.

        They lie in one folder, the command's working directory, readable by the agent and not writable. The session
        token is in RATCHET_SESSION_TOKEN. """

    def environment(self, spec: HarnessSpec) -> dict[str, str]:
        """What the program finds in its environment beside the token and the box's own; `spec.extra_env` comes last."""
        return {**spec.extra_env}

    def check(self, extra: Mapping[str, JsonValue]) -> None:
        """Raises ConfigError for options that this harness does not know; called when a run starts."""
        try:
            self.options.model_validate(extra)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ConfigError(f"harness {self.name}: {problems}") from None

    async def install(self, box: Sandbox, spec: HarnessSpec) -> None:  # noqa: B027
        """Puts the program into the box where the image does not have it."""

    async def start(self, box: Sandbox, spec: HarnessSpec, attempt: int, token: str) -> StartResult:
        """Starts the agent detached, unless this attempt was started before. Raises CommandFailedError if it cannot."""
        return await launcher.start_once(
            box,
            self.configure(spec),
            token,
            attempt=attempt,
            user=spec.agent_user,
            budget_seconds=spec.time_budget_seconds,
        )

    async def wait(self, box: Sandbox, attempt: int) -> ExitReport:
        """Returns when the agent has ended: one long command in the box. Cancelling it leaves the agent alone."""
        record, errors = await launcher.wait_for_exit(box, attempt)
        if record.reason in ("deadline", "stalled"):
            kind = AgentExit.TIME_BUDGET
        elif record.reason == "exit" and record.exit_code is not None:
            kind = await self.read_exit(box, attempt, record.exit_code, errors)
        else:
            kind = AgentExit.CRASHED
        return ExitReport(kind, record.exit_code, record.used_seconds, errors or record.reason)

    async def read_exit(self, box: Sandbox, attempt: int, exit_code: int, errors: str) -> AgentExit:
        """What the end of a program that ended by itself means. `errors`: the last lines of its standard error."""
        return AgentExit.DONE if exit_code == 0 else AgentExit.CRASHED

    async def extend(self, box: Sandbox, attempt: int, waited_seconds: float) -> None:
        """Moves the deadline to start + budget + `waited_seconds`, the sum of all waits so far (not an increment)."""
        await launcher.extend_deadline(box, attempt, waited_seconds)

    async def stop(self, box: Sandbox, attempt: int) -> None:
        """Ends an agent that makes no progress, as its deadline would: `wait` returns `time_budget`."""
        await launcher.stop_stalled(box, attempt)

    async def collect(self, box: Sandbox, attempt: int) -> Transcript:
        """Reads the transcript, empty if there is none; works while the agent runs, too. A program that printed without
        end gets no further."""
        return self.read_transcript(await launcher.read_output(box, attempt, MAX_TRANSCRIPT_BYTES))

    @abstractmethod
    def read_transcript(self, data: bytes) -> Transcript:
        """Counts what the program printed; a last line that was cut off when it died does not count."""

    async def end(self, box: Sandbox, attempt: int) -> None:
        """Ends every process of the agent's user and checks that none is left; else raises CommandFailedError."""
        await launcher.end_tree(box, attempt)


def exports(environment: Mapping[str, str]) -> str:
    """Shell lines for the top of a `command.sh`."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def json_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects among the lines; everything else, a cut last line included, is passed over."""
    found = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found


def render_prompt(template: str, problem_statement: str, workdir: str) -> str:
    """Fills `{problem_statement}` and `{workdir}`; other braces, and braces inside the values, stay as they are."""
    values = {"problem_statement": problem_statement, "workdir": workdir}
    return re.sub(r"\{(problem_statement|workdir)\}", lambda match: values[match[1]], template)
