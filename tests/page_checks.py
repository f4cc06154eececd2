"""Find what a folder of pages lacks: targets of links, and words for config keys, commands, options and variables."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TESTS = ("tests", "scripts")
INTERNAL = {
    "E2B_MAX_CONNECTIONS",
    "RATCHET_END_MARK",
    "RATCHET_ENGINE_PIDFILE",
    "RATCHET_PATH",
    "RATCHET_STACK",
    "RATCHET_STARTED",
    "RATCHET_WITNESS",
    "RATCHET_WORKDIR",
}
"""Variables that one process of the product sets for another; people do not set them."""

LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
VARIABLE = re.compile(r"""["']((?:RATCHET|TEMPORAL|E2B|ADAPTER|OTEL|VIME_AGENT|SWE)_[A-Z0-9_]+)["'=]""")


def dead_links(root: Path) -> list[str]:
    """Return a sentence for each link of a page below `root` whose file or heading does not exist."""
    return [
        f"{page.relative_to(root)}: no {target}{'#' if anchor else ''}{anchor}"
        for page in sorted(root.rglob("*.md"))
        for target, anchor in LINK.findall(_prose(page))
        if not _leads_somewhere(page.parent / target if target else page, anchor)
    ]


def _leads_somewhere(file: Path, anchor: str) -> bool:
    return file.exists() and not (anchor and file.suffix == ".md" and anchor not in _anchors(file.resolve()))


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def without_words(root: Path) -> list[str]:
    """Return a sentence for each config key, command, option and variable that has no words below `root`."""
    import typer

    from cli.main import app

    config = (root / "docs/reference/configuration.md").read_text()
    keys = re.findall(r"^\| `([^`]+)` \| .+ \|  \| [^|]*\|$", config, re.M)
    text = "".join(page.read_text() for page in root.rglob("*.md"))
    product = [file for file in Path().glob("[a-z]*/**/*.py") if file.parts[0] not in TESTS]
    named = {name for file in product for name in VARIABLE.findall(file.read_text())}
    return [
        *(f"config key {key}: its field has no sentence" for key in keys),
        *_commands(typer.main.get_command(app), "ratchet"),
        *(f"variable {name}: no page names it" for name in sorted(named - INTERNAL) if name not in text),
    ]


def _commands(command: Any, name: str) -> Iterator[str]:
    if not command.help:
        yield f"command {name}: it has no help"
    for parameter in command.params:
        if parameter.name != "json" and not getattr(parameter, "help", ""):  # `--json` means the same everywhere
            yield f"command {name}: {parameter.name} has no help"
    for inner in getattr(command, "commands", {}).values():
        yield from _commands(inner, f"{name} {inner.name}")
