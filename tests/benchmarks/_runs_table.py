"""The table of docs/reference/benchmarks.md: commit and machine of each file in docs/bench/."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path("docs/bench")


def bench_runs_table() -> str:
    """Return a row per JSON file that a benchmark has printed. A list is several runs, the last of which counts."""
    lines = ["| file | commit | machine |", "|---|---|---|"]
    for path in sorted(FOLDER.glob("*.json")):
        printed = json.loads(path.read_text())
        run = printed[-1] if isinstance(printed, list) else printed
        lines.append(f"| `{path}` | {run['commit']} | {_machine(run)} |")
    return "\n".join(lines) + "\n"


def _machine(run: Mapping[str, Any]) -> str:
    """Return what the run says of its machine; benchmarks name different facts."""
    named = run.get("machine", {})
    facts = {"architecture": named} if isinstance(named, str) else dict(named)
    facts |= {
        key: run[key] for key in ("processor", "cores", "load_at_start", "load_before", "load_average") if key in run
    }
    words = [str(facts[key]) for key in ("processor", "architecture") if key in facts]
    if "cores" in facts:
        words.append(f"{facts['cores']} cores")
    loads = [value for key, value in facts.items() if key.startswith("load")]
    if loads:
        words.append(f"load {loads[0]:.1f}")  # some look before a run, some after it
    return ", ".join(words) or "not recorded"
