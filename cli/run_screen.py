"""One screen that shows what a run waits for: `ratchet status RUN` and `ratchet watch`."""

import textwrap
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from cli.console import print_json
from ratchet.errors import MachineError
from reads.vitals import WAITS_FOR
from stack.parts import Stack

if TYPE_CHECKING:
    from stack.run_status import Diagnosis

_WIDTH = 79
_HEIGHT = 24
_MAX_LINES = 3
_ANSWER_LINES = 8


def print_run(run_id: str, as_json: bool) -> None:
    """Print what a run waits for. Exits with 2 if nothing is known of it, because the store does not answer."""
    from client.session import run_blocking
    from stack.run_status import UNKNOWN, diagnose

    found = run_blocking(diagnose(Stack(), run_id))
    if as_json:
        print_json(found.as_json())
    else:
        print("\n".join(lines_of(found)))
    if found.state == UNKNOWN:
        raise typer.Exit(MachineError.cli_exit_code)


def lines_of(found: "Diagnosis") -> list[str]:
    """Return the screen of a diagnosis: at most 24 lines, and few lines of each kind."""
    from stack.run_status import UNKNOWN

    if found.state == UNKNOWN:
        lines = [f"nothing is known of run {found.run_id}", *_wrap("", found.answer, _ANSWER_LINES)]
    else:
        progress = "started by hand" if found.is_by_hand else f"step {found.step} of {found.num_steps}"
        since = next((f" ({one.detail})" for one in found.vitals if one.name == WAITS_FOR and one.detail), "")
        waits_for = _wrap("waits for: ", found.answer + since, _ANSWER_LINES)
        lines = [f"run {found.run_id} is {found.state}, {progress}", *waits_for]
    lines += _wrap("boxes: ", found.boxes) if found.boxes else []
    for name, words in list(found.parts.items())[:_MAX_LINES]:
        lines += _wrap(f"{name} does not answer: ", words) if words not in found.answer else []
    for one in found.retried[:_MAX_LINES]:
        what, tried = ("waits for room", "") if one.is_waiting else ("is retried", f"try {one.tries}: ")
        lines += _wrap(f"{one.activity} {what} in {one.count} workflows: ", f"{tried}{one.error}")
    behind = _wrap("learner: ", found.learner) if found.learner else []
    behind += [line for words in found.working[:_MAX_LINES] for line in _wrap("", words)]
    for task in found.quarantined[:_MAX_LINES]:
        behind += _wrap(f"{task.label} is in quarantine: ", f"{task.num_failures} groups failed: {task.reason}")
    if len(found.quarantined) > _MAX_LINES:
        behind.append(f"{len(found.quarantined) - _MAX_LINES} more tasks are in quarantine (--json lists them)")
    behind += [line for words in found.notes for line in _wrap("not looked at: ", words)]
    facts = [one.sentence() for one in found.vitals if one.name != WAITS_FOR]
    told = [_wrap("", fact, max_lines=1) for fact in facts]
    room = _HEIGHT - 1 - len(lines) - len(told)
    for number, fact in enumerate(facts):  # each has a line; the first ones have all their details
        whole = _wrap("", fact)
        if len(whole) - 1 <= room:
            room -= len(whole) - 1
            told[number] = whole
    lines += [line for fact in told for line in fact] + behind
    return lines if len(lines) <= _HEIGHT else [*lines[: _HEIGHT - 1], "… `ratchet status RUN --json` shows everything"]


def _wrap(title: str, text: str, max_lines: int = _MAX_LINES) -> list[str]:
    """Return at most so many lines as wide as the terminal, or of 79 columns without one, the later ones indented."""
    console, words = Console(), title + " ".join(text.split())
    width = console.width if console.is_terminal else _WIDTH
    return textwrap.wrap(words, width, subsequent_indent="  ", max_lines=max_lines, placeholder=" …")
