"""The help of a command from its docstring: paragraphs without the line breaks of the source.

Typer keeps them from the second paragraph on, and then breaks each of these lines again at the terminal's width.
"""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

_ITEM = re.compile(r"\s|[-*|] ")
"""The beginning of a line that does not continue the one before: an indent, the mark of a list item or a table row."""


class InPanels(TyperGroup):
    """A group whose help shows commands and groups in the order of their panels, instead of all commands first."""

    panels: Sequence[str] = ("Run", "Look", "Steer", "Tasks and models", "Machine")

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the panels."""
        order = {panel: number for number, panel in enumerate(self.panels)}
        panel_of = {name: getattr(one, "rich_help_panel", None) for name, one in self.commands.items()}
        return sorted(self.commands, key=lambda name: order.get(str(panel_of[name]), len(order)))


def unwrapped(docstring: str) -> str:
    """Return the docstring with one line per paragraph, list item or indented line."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if lines and line and lines[-1] and not _ITEM.match(line) and not _ITEM.match(lines[-1]):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


def unwrap_help(app: typer.Typer) -> None:
    """Unwrap the help of every command of an app and of its groups."""
    for command in app.registered_commands:
        command.help = unwrapped(command.help or inspect.getdoc(command.callback) or "")
    for group in app.registered_groups:
        assert group.typer_instance is not None
        unwrap_help(group.typer_instance)
        callback = group.typer_instance.registered_callback
        if callback is not None:
            callback.help = unwrapped(callback.help or inspect.getdoc(callback.callback) or "") or None
