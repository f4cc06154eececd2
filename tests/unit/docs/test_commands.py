"""Commands that the pages show can be typed as they stand: command, subcommand and options exist."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

RATCHET = typer.main.get_command(app)
USAGE_ERROR = typer.BadParameter.__bases__[0]
"""The base of all errors of an argument, which typer does not export."""

BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?ratchet [^`]+)`")
IN_A_BLOCK = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\S*/bin/)?ratchet .+)$", re.M)
CALL = re.compile(r"(?:^|[/ ])ratchet ")


def shown(text: str) -> Iterator[str]:
    """Each call of `ratchet` in backticks or in a fenced block, without what stands before it."""
    joined = text.replace("\\\n", " ")
    calls = [*INLINE.findall(BLOCK.sub("", text).replace("\n", " "))]
    for block in BLOCK.findall(joined):
        calls += IN_A_BLOCK.findall(block)
    for call in calls:
        yield CALL.split(call, maxsplit=1)[1]


def problem(call: str) -> str | None:
    """Say what of the call does not exist; None if it can be typed."""
    words = shlex.split(re.sub(r"(?<!\S)#.*|[|;&>].*", "", call), posix=True)
    command: Any = RATCHET
    while getattr(command, "commands", None) and words:
        name, *words = words
        if name == "COMMAND" or re.match(r"\[|--(help|version|install-completion)$", name):
            return None
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    context = command.make_context(command.name, [], resilient_parsing=True)
    context.resilient_parsing = False
    try:
        _, extra, _ = command.make_parser(context).parse_args([word.strip("[]") for word in words])
    except USAGE_ERROR as error:
        names_option = words[-1].startswith("--") and "requires an argument" in str(error)  # without its value
        return None if names_option else f"{command.name}: {error}"
    return f"{command.name} takes no {extra[0]}" if extra and not context.allow_extra_args else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_exist(page: Path) -> None:
    found = {call: problem(call) for call in shown(page.read_text())}
    assert {call: why for call, why in found.items() if why} == {}


def test_commands_in_the_notebook_exist() -> None:
    cells = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())["cells"]
    calls = [call for cell in cells for call in shown("".join(cell["source"]))]
    assert [problem(call) for call in calls if problem(call)] == []


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("staus", "no command staus"),
        ("show runs --colour", "runs: No such option: --colour"),
        ("set --add-steps", None),
        ("evaluate --compare A RUN@7", None),
        ("evaluate RUN@7 --compare A", "evaluate: Option '--compare' requires 2 arguments."),
        ("show rollout 1677 1678", "rollout takes no 1678"),
        ("models chek DIR", "no command chek"),
        ("train configs/quickstart.yaml --set training.steps=3", None),
    ],
)
def test_a_wrong_call_is_found(call: str, why: str | None) -> None:
    assert problem(call) == why


def test_pages_show_commands() -> None:
    assert sum(len([*shown(page.read_text())]) for page in PAGES) > 100
