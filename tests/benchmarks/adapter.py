"""Benchmark: what a turn costs in the adapter: prompts by three methods, a thousand sessions at once, what the store
takes.

`ratchet admin bench adapter --json`; without --full with one repeat of the prompt methods and 30 s of random arrivals.
`ratchet admin bench adapter -- --against REV` measures whole turns alone, of the working tree and of a git revision in
turn; without --full in three rounds.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import psutil

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parents[2]))

from cli.console import say
from tests.benchmarks import _adapter_load, _prompt_cost
from tests.benchmarks._commit import commit
from tests.benchmarks._options import command_line


def _whole_turn(prompt: dict[str, Any], turns: dict[str, Any]) -> dict[str, Any]:
    """CPU time of a whole turn of the adapter, and what it would be if each prompt was rendered and tokenised in full.

    That is the way of slime's adapter, with our HTTP, engine client and store.
    """
    ours = turns["adapter_cpu_ms_per_turn"]
    full = ours - prompt["cpu_ms"]["ours"] + prompt["cpu_ms"]["full"]
    return {
        "prompt_tokens": turns["prompt_tokens"],
        "cpu_ms": {"ours": ours, "with_full_rendering": round(full, 1)},
        "full_rendering_over_ours": round(full / ours, 1),
        "prompt_alone_full_over_ours": prompt["full_over_ours"],
    }


def _against(revision: str, num_rounds: int) -> dict[str, Any]:
    """Whole turns of the working tree's adapter (ours) and of a revision's (theirs)."""
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as directory:
        archive = subprocess.run(["git", "archive", revision], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", directory], check=True, input=archive)
        return {"against": revision, **asyncio.run(_adapter_load.compare(Path(directory), num_rounds, say))}


def _all(full: bool) -> dict[str, Any]:
    prompt_cost = _prompt_cost.measure(7 if full else 1, say)
    load = _adapter_load.measure(1000, 120 if full else 30, say)
    last_turns = load["one_long_conversation"]["last_turns"]
    return {"prompt_cost": prompt_cost, "whole_turn": _whole_turn(prompt_cost["depths"][-1], last_turns), **load}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--against", metavar="REV", help="a git revision with which whole turns are compared")
    options = parser.parse_args()
    machine = {"cores": os.cpu_count(), "load_average_at_start": round(psutil.getloadavg()[0], 1)}
    measured = _against(options.against, 10 if options.full else 3) if options.against else _all(options.full)
    result = {"commit": commit(), "machine": machine, **measured}
    sys.stdout.buffer.write(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
