"""The page of the brief: its features with the tests that prove them, and what its launcher sets differently."""

import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_STATES = {"": "yes", "partly": "partly", "no": "**no**"}


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text())


def brief_page() -> str:
    """Return the page's text below its title."""
    features = read("features.toml")["feature"]
    counts = {state: sum(one.get("state", "") == state for one in features) for state in _STATES}
    counted = (
        f"{len(features)} features, of which {counts['']} are there, {counts['partly']} partly and {counts['no']} not"
    )
    lines = [
        f"The README of vime's example `coding_agent_rl`, line by line: {counted}. Each test is in this repository.",
        "",
        "| line | feature | there | where | test |",
        "|---|---|---|---|---|",
    ]
    for one in features:
        there = _STATES[one.get("state", "")] + (f": {_cell(one['note'])}" if "note" in one else "")
        tests = "<br>".join(f"`{test}`" for test in one["tests"])
        lines.append(f"| {one['line']} | {_cell(one['what'])} | {there} | `{one['where']}` | {tests} |")
    lines += [
        "",
        "## What the config of eight nodes sets differently",
        "",
        "`configs/qwen36_35b_a3b_swe_8nodes.yaml` against `run_qwen36_35b_a3b_swe_8nodes.sh`. All other keys have the",
        "launcher's value, or it has nothing like them.",
        "",
        "| key | there | here |",
        "|---|---|---|",
    ]
    different = read("launcher.toml")["different"]
    lines += [f"| `{key}` | {_cell(there)} | {_cell(here)} |" for key, (there, here) in different.items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
