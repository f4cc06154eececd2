"""The services of a rollout with a scripted engine and the real agent programs.

Only the engine is scripted, so that the work of a real CLI can be predicted; everything else is real.
"""

import pytest

from activities.harnesses.agent_programs import AgentProgram
from ratchet.errors import MachineError
from stack.agent_programs import FETCHABLE, fetch_program
from tests.integration.workflows.conftest import collector, home, loop, model  # noqa: F401  # fixtures


def require_program(name: str) -> AgentProgram:
    """Return the fetched program; skip with the reason if it cannot be fetched."""
    program = FETCHABLE[name]()
    try:
        fetch_program(program, print)
    except MachineError as reason:
        pytest.skip(str(reason))
    return program
