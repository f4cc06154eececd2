"""What all harnesses share whose program has to be fetched first (`ratchet agents fetch`).

Why here: which version is recorded and how the program gets into a box is the same for all of them.
Called by: `claude_code.py`, `codex.py`, `mini_swe_agent.py`.
"""

from abc import abstractmethod

from activities.harnesses import agent_programs
from activities.harnesses.base import BaseHarness, HarnessSpec
from activities.sandboxes.base import Sandbox


class FetchedHarness(BaseHarness):
    def __init__(self) -> None:
        self._program = self.find_program()

    @abstractmethod
    def find_program(self) -> agent_programs.AgentProgram:
        """The pinned program, or what the environment names in its place."""

    @property
    def version(self) -> str:
        return self._program.version

    async def install(self, box: Sandbox, spec: HarnessSpec) -> None:
        await agent_programs.ensure_program(box, self._program)
