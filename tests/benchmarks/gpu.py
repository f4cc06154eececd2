"""The learner on one GPU, in one go of at most nine minutes: `python -m tests.benchmarks.gpu`.

- a step at 0.6B and 4B, over 16k and 64k tokens: tokens per second, MFU, memory, and the logprobs against float32
- the same batch through a plain Hugging Face loop on the same card
- LoRA at 4B and 8B
- the gain of prefix trees, at 0.6B, and what the learner chooses by itself
- with `--only model --model DIR`: seconds until a real model is loaded and its check has passed, and its steps

Weights are random, in the shapes of Qwen3 (`_sizes.py` says what a step is). Every figure is of a process of its own.
What does not begin within `--seconds` is listed under `left_out`, so that a short loan of a card still gives what was
measured. Prints JSON, and each figure to standard error as soon as it exists. `--cpu-toy` runs all of it on a CPU in a
toy size, which shows that it works and measures nothing.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import _sizes, training
from tests.benchmarks._commit import commit

ROUNDS = 2
Case = tuple[str, int, tuple[_sizes.Way, ...]]
"""Size, tokens, and what is measured of them."""
PLAN: tuple[Case, ...] = (
    ("0.6B", 16_384, (_sizes.Ours, _sizes.Plain, _sizes.Exact)),
    ("4B", 16_384, (_sizes.Ours, _sizes.Plain, _sizes.Lora)),
    ("8B", 16_384, (_sizes.Lora,)),
    ("0.6B", 65_536, (_sizes.Ours, _sizes.Plain)),
    ("4B", 65_536, (_sizes.Ours, _sizes.Lora)),
)
TOY_PLAN: tuple[Case, ...] = (("toy", 256, (_sizes.Ours, _sizes.Plain, _sizes.Exact, _sizes.Lora)),)


class Budget:
    """Runs what begins before the end of the time, and names the rest."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, None if the time is over or its process died."""
        if time.monotonic() > self.end:
            self.left_out.append(f"{name}: the time was over")
            return None
        try:
            found = work()
        except EOFError:
            self.left_out.append(f"{name}: its process died")
            return None
        print(json.dumps({name: found}, default=lambda _: None), file=sys.stderr, flush=True)
        return found


def measure_sizes(plan: tuple[Case, ...], budget: Budget) -> list[dict[str, Any]]:
    results = []
    for size, length, ways in plan:
        with _sizes.random_model(size) as model:
            results.append(_measure_length(ways, model, size, length, budget))
    return results


def _measure_length(
    ways: tuple[_sizes.Way, ...], model: Path, size: str, length: int, budget: Budget
) -> dict[str, Any]:
    result: dict[str, Any] = {"size": size, "tokens": length}
    logprobs: dict[str, Any] = {}
    for way in ways:
        name = way.__name__.lower()
        found = budget.run(f"{size} {length} {name}", lambda way=way: _sizes.measure_way(way, model, length, ROUNDS))
        if found is not None:
            result[name], logprobs[name] = found
    against = {
        name: _sizes.difference(logprobs[name], logprobs["exact"])
        for name in logprobs
        if name != "exact" and "exact" in logprobs
    }
    return result | {"against_float32": against}


def measure_trees(size: str, scale: int, budget: Budget) -> list[Any]:
    cases = [case.scaled(scale) for case in training.GPU_CASES]
    with _sizes.random_model(size) as model:
        return [budget.run(f"trees, {case.name}", lambda case=case: _measure_case(case, model)) for case in cases]


def _measure_case(case: Any, model: Path) -> dict[str, Any]:
    # Single chains of a large batch would take most of a short loan.
    ways = ("tree", "packed", "auto", "separate") if case.bin_tokens is None else ("tree", "packed", "auto")
    workers = [training.Worker(way, model, model, os.cpu_count() or 1) for way in ways]
    try:
        return training.run_case(case, workers, ROUNDS, "seconds")
    finally:
        for worker in workers:
            with contextlib.suppress(BrokenPipeError):  # it has died, which the budget names
                worker.end()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="no measurement begins after that many seconds")
    parser.add_argument("--cpu-toy", action="store_true", help="a toy size on a CPU, which measures nothing")
    parser.add_argument("--only", choices=("sizes", "trees", "model"), help="measure one of these")
    parser.add_argument("--model", type=Path, help="a model directory, for `--only model`")
    options = parser.parse_args()
    if options.cpu_toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none; use --cpu-toy to see whether it works")
    os.environ["HF_HUB_OFFLINE"] = "1"
    card = None if options.cpu_toy else torch.cuda.get_device_name()
    budget = Budget(options.seconds)
    started = time.monotonic()
    sizes = []
    if options.only == "model":
        length = 256 if options.cpu_toy else 16_384
        way = partial(_sizes.measure_way, _sizes.Ours, options.model, length, ROUNDS)
        sizes = [budget.run(f"{options.model} {length}", lambda: way()[0])]
    elif options.only != "trees":
        sizes = measure_sizes(TOY_PLAN if options.cpu_toy else PLAN, budget)
    trees = []
    if options.only in (None, "trees"):
        trees = measure_trees("toy" if options.cpu_toy else "0.6B", 16 if options.cpu_toy else 1, budget)
    seconds = round(time.monotonic() - started, 1)
    found = {"commit": commit(), "card": card, "torch": torch.__version__, "seconds": seconds}
    print(json.dumps(found | {"sizes": sizes, "trees": trees, "left_out": budget.left_out}, indent=2))


if __name__ == "__main__":
    # By module name, so that child processes find the same classes.
    sys.path.insert(0, os.getcwd())
    from tests.benchmarks.gpu import main as named_main

    named_main()
