"""`ratchet show requests`: list what people have asked of a run."""

from typing import Annotated, Any

import typer

_INDENT = "    "


def requests(
    run: Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List what people have asked of a run, newest first: who, when, from what to what, and the first step planned
    after it.
    """
    from rich.console import Console

    from cli.console import print_json
    from client import Client

    found = Client().run(run).steering()
    if json:
        print_json(found)
        return
    console = Console()
    print(f"requests to {run}" if found else f"no requests to {run}")
    for line in request_lines(found, console.width if console.is_terminal else None):
        print(line)


def request_lines(requests: list[dict[str, Any]], width: int | None) -> list[str]:
    """Return a paragraph per request, of lines that are no longer than `width`; None: not broken."""
    import textwrap

    lines: list[str] = []
    for one in requests:
        told = [f"{one['asked_at']:%Y-%m-%d %H:%M:%S}  {one['asked_by']}"]
        told.append(one["what"])
        told.append(f"first step planned after it: {one['from_step']}")
        if one["reason"]:
            told.append(f"why: {one['reason']}")
        for number, text in enumerate(told):
            indent = _INDENT if number else ""
            flat = indent + " ".join(text.split()) if number else text
            lines += textwrap.wrap(flat, width, subsequent_indent=_INDENT * 2) if width is not None else [flat]
    return lines
