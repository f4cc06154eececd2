"""Base of the harnesses whose program is fetched first (`ratchet agents fetch`)."""

from abc import abstractmethod

from activities.harnesses import agent_programs
from activities.harnesses.base import BaseHarness, HarnessSpec
from activities.sandboxes.base import Sandbox


class FetchedHarness(BaseHarness):
    """A harness that records the program's version and uploads it if needed."""

    def __init__(self) -> None:
        self._program = self.find_program()

    @abstractmethod
    def find_program(self) -> agent_programs.AgentProgram:
        """Return the pinned program, or the one that the environment names instead."""

    @property
    def version(self) -> str:
        return self._program.version

    async def install(self, box: Sandbox, spec: HarnessSpec) -> None:
        await agent_programs.ensure_program(box, self._program)
