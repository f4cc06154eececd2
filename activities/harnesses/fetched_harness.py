"""Base of the harnesses whose program is fetched first (`ratchet admin agents fetch`)."""

import shlex
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from activities.harnesses import agent_programs
from activities.harnesses.base import BaseHarness, HarnessSpec, exports, json_lines
from activities.harnesses.cli_exits import last_output
from ratchet.types import AgentExit
from sandboxes.base import Sandbox


class FetchedHarness(BaseHarness):
    """A harness that records the program's version and uploads it if needed."""

    def __init__(self) -> None:
        self._program = self.find_program()

    def find_program(self) -> agent_programs.AgentProgram:
        """Return the pinned program of this harness or of its base, or the one that the environment names instead."""
        names = (getattr(base, "name", "") for base in type(self).__mro__)
        return next(agent_programs.PROGRAMS[name]() for name in names if name in agent_programs.PROGRAMS)

    @property
    def version(self) -> str:
        return self._program.version

    def program_files(
        self, template: str, spec: HarnessSpec, arguments: Sequence[str] | None = None
    ) -> dict[str, bytes]:
        """Return `command.sh` and `prompt.txt`. The command is the environment and the filled template. `template`:
        with `workdir`, `program` and `arguments`. `arguments`: all of them; None: only `spec.extra_args`."""
        if arguments is None:
            arguments = shlex.split(spec.extra_args or "")
        filled = template.format(
            workdir=shlex.quote(spec.workdir), program=self._program.box_path, arguments=shlex.join(arguments)
        )
        command = exports(self.environment(spec)) + filled
        return {"command.sh": command.encode(), "prompt.txt": spec.prompt.encode()}

    async def install(self, box: Sandbox, spec: HarnessSpec) -> None:
        await agent_programs.ensure_program(box, self._program)


class EventsHarness(FetchedHarness):
    """A harness whose program writes events, as JSON lines."""

    async def read_exit(self, box: Sandbox, attempt: int, exit_code: int, errors: str) -> AgentExit:
        return self.exit_of_events(json_lines(await last_output(box, attempt)), exit_code)

    @staticmethod
    @abstractmethod
    def exit_of_events(events: list[dict[str, Any]], exit_code: int) -> AgentExit:
        """Return the exit of a program that ended by itself, by the last events of its output."""
