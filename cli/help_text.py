"""The help of a command from its docstring: paragraphs without the line breaks of the source.

Typer keeps them from the second paragraph on, and then breaks each of these lines again at the terminal's width.
"""

import inspect
import re

import typer

_ITEM = re.compile(r"\s|[-*|] ")
"""The beginning of a line that does not continue the one before: an indent, the mark of a list item or a table row."""


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
    for command in app.registered_commands:
        command.help = unwrapped(command.help or inspect.getdoc(command.callback) or "")
    for group in app.registered_groups:
        assert group.typer_instance is not None
        unwrap_help(group.typer_instance)
        callback = group.typer_instance.registered_callback
        if callback is not None:
            callback.help = unwrapped(callback.help or inspect.getdoc(callback.callback) or "") or None
