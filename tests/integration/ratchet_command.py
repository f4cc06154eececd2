"""Commands of the program, run in the test's own process: a process of their own would import everything again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from cli.main import run_app


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command."""

    code: int
    output: str
    error: str


Ratchet = Callable[..., Ended]
"""Runs a command with the given arguments and, as keywords, variables."""


@pytest.fixture
def ratchet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Ratchet:
    """Run commands in a thread, since they start event loops of their own. The variables stay until the test ends."""

    def run(*arguments: str, **variables: str) -> Ended:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["ratchet", *arguments])
        capfd.readouterr()
        with ThreadPoolExecutor(1) as thread:
            code = thread.submit(run_app).result()
        said = capfd.readouterr()
        return Ended(code, said.out, said.err)

    return run
