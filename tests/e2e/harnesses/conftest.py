"""The loop's services with a scripted engine, and the real agent programs.

Why here: what the policy says must be known, so that a real CLI's work can be told; all else, the CLI first of all, is real.
Called by: the tests of this folder.
"""

import pytest

from activities.harnesses.agent_programs import AgentProgram
from ratchet.errors import MachineError
from stack.agent_programs import FETCHABLE, fetch_program
from tests.integration.workflows.conftest import home, loop, model  # noqa: F401  # fixtures


def require_program(name: str) -> AgentProgram:
    """The fetched program; skips with the reason where it cannot be had."""
    program = FETCHABLE[name]()
    try:
        fetch_program(program, print)
    except MachineError as reason:
        pytest.skip(str(reason))
    return program
