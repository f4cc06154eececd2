"""Numbers on the command line have bounds: beyond them, and without a number, a sentence names option and bound."""

import inspect
from typing import get_args

import pytest
from typer.models import ParameterInfo
from typer.testing import CliRunner

from cli.main import app
from tests.unit.cli.test_help_text import commands


def test_every_number_of_every_command_has_bounds() -> None:
    num_found, without = 0, []
    for command in commands(app):
        assert command.callback is not None
        for parameter in inspect.signature(command.callback).parameters.values():
            kind, *settings = get_args(parameter.annotation) or (None,)
            option = next((one for one in settings if isinstance(one, ParameterInfo)), None)
            if option is not None and ({kind, *get_args(kind)} & {int, float} or "list[float]" in str(kind)):
                num_found += 1
                if option.min is None or option.max is None:
                    without.append((command.callback.__module__, parameter.name))
    assert num_found > 15
    assert without == []


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        (["top", "--limit", "-1"], "greater than or equal to 1"),
        (["rollouts", "--limit", str(10**30)], "less than or equal to 1000000"),
        (["tiny-policy", "--seed", str(2**70)], "less than or equal to 9223372036854775807"),
        (["tasks", "admit", "x.jsonl", "--limit", "0"], "greater than or equal to 1"),
        (["evaluate", "x", "--temperature", "-3"], "greater than or equal to 0"),
        (["evaluate", "x", "--temperature", "nan"], "less than or equal to 100"),
        (["logs", "worker", "--lines", "-5"], "greater than or equal to 0"),
        (["checkpoints", "export", "r", "d", "--step", str(2**31)], "less than or equal to 2147483647"),
        (["top", "--limit", "9" * 5000], "Unable to parse input string as an integer"),
    ],
)
def test_a_number_beyond_its_bounds_is_a_sentence(arguments: list[str], bound: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert arguments[-2] in words and bound in words
