"""Help fills the lines of a terminal; the line breaks of a docstring do not matter."""

import inspect
from collections.abc import Iterator

import pytest
import typer
from typer.models import CommandInfo
from typer.testing import CliRunner

from cli.help_text import unwrapped
from cli.main import app


def commands(of: typer.Typer) -> Iterator[CommandInfo]:
    yield from of.registered_commands
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def test_paragraphs_are_joined_and_lists_are_kept() -> None:
    text = """One sentence
    goes on.

    A list:
    - the first
    - the second

        an example
        of two lines
    """
    expected = "One sentence goes on.\n\nA list:\n- the first\n- the second\n\n    an example\n    of two lines"
    assert unwrapped(text) == expected
    assert unwrapped(expected) == expected


def test_every_command_has_unwrapped_help() -> None:
    found = list(commands(app))
    assert len(found) > 50
    for command in found:
        assert command.help and command.help == unwrapped(inspect.getdoc(command.callback) or command.help)


def test_a_long_help_fills_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = CliRunner().invoke(app, ["stop", "--help"]).stdout
    assert "Of a run: rollouts in flight are cancelled. An evaluation that runs ends" in shown
