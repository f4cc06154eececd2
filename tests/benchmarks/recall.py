"""A quickstart whose tests of one family of tasks are wrong, recalled, beside a run that never had the fault.

All three runs are real, on a stack of their own that is deleted at the end: `faulty` is trained while the tests of one
of three families of bugs accept what they should refuse, and the reverse. Then its dataset is mended, and `ratchet
recall --apply` makes `recalled` of it. `clean` is trained on the right tests from the start. Held-out tests are always
right, and of the same families. `max_staleness` is 2, so that the first two steps of `recalled` need no sampling.

`ratchet admin bench recall` prints, and writes to --out after each run, solve rates by family, the curve, how far the
policy was from the one that sampled, and the cost: rollouts, sampled tokens and CPU seconds. It takes about 35 minutes
on two cores. `--steps 3 --set training.group_size=4` is a try.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sqlalchemy import func, select

from cli.console import print_json, say
from cli.down import down
from client import Client, Run
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from reads.curves import metrics_by_step
from reads.recall import retrained_runs
from reads.run_result import evaluation_rewards
from stack.cpu_meter import CpuMeter
from stack.parts import Stack
from stack.startup import bring_up
from store.schema import RolloutTable, TurnTable
from tests.benchmarks._commit import commit
from tests.free_ports import free_ports

ROOT = Path(__file__).parents[2]
FAMILIES = ("bool_operator", "off_by_one", "initial_value")
SETTINGS = ("training.max_staleness=2", "evaluation.samples=3")
CURVE = (
    "reward_mean",
    "mismatch_kl",
    "mismatch_max",
    "ratio_ess",
    "masked_fraction",
    "staleness_mean",
    "groups_trained",
)
_SAMPLE_SECONDS = 3.0
_TEST = re.compile(r"^def test_\w+\(\):\n((?:    .*\n|\n(?=    ))+)", re.MULTILINE)
_INVERTED = """def right():
{body}

def test_inverted():
    try:
        right()
    except Exception:
        return
    raise AssertionError('it is right')
"""


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the quickstart's rows of the families."""
    lines = (ROOT / "datasets" / "quickstart" / f"{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["metadata"]["family"] in FAMILIES]


def with_wrong_tests(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the first family with inverted tests, any other as it is."""
    metadata = row["metadata"]
    if metadata["family"] != FAMILIES[0]:
        return row
    wrong, count = _TEST.subn(lambda found: _INVERTED.format(body=found[1]), metadata["eval_cmd"])
    assert count == 1, metadata["eval_cmd"]
    return {**row, "metadata": {**metadata, "eval_cmd": wrong, "broken_oracles": []}}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Meter:
    """CPU seconds of the stack's parts while it is open."""

    def __init__(self, stack: Stack) -> None:
        self.meter = CpuMeter(stack)
        self.begun = time.monotonic()
        self.has_ended = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self.has_ended.wait(_SAMPLE_SECONDS):
            self.meter.sample()

    def __enter__(self) -> "Meter":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.has_ended.set()
        self.thread.join()
        self.meter.sample()
        self.seconds = round(time.monotonic() - self.begun)
        self.parts = {part: round(used, 1) for part, used in self.meter.used.items()}

    def result(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "cpu_seconds": round(sum(self.parts.values())), "cpu_by_part": self.parts}


def describe(run: Run) -> dict[str, Any]:
    """Return a run's held-out rates, curve and sampled rollouts and tokens."""

    async def read(connection: Any) -> dict[str, Any]:
        of_run = RolloutTable.run_id == run.run_id
        sampled = select(RolloutTable.purpose, func.count(RolloutTable.id.distinct()), func.sum(TurnTable.num_sampled))
        sampled = sampled.outerjoin(TurnTable, TurnTable.rollout_id == RolloutTable.id).where(of_run)
        found = (await connection.execute(sampled.group_by(RolloutTable.purpose))).all()
        metrics = await metrics_by_step(connection, run.run_id, 1, 1000)
        return {
            "run_id": run.run_id,
            "state": run_row.state,
            "held_out": rates(await evaluation_rewards(connection, run.run_id)),
            "sampled": {purpose: {"rollouts": count, "tokens": int(tokens or 0)} for purpose, count, tokens in found},
            "curve": {
                step: {name: round(of[name], 4) for name in CURVE if name in of} for step, of in sorted(metrics.items())
            },
            "trained_again": await retrained_runs(connection, run.run_id),
        }

    run_row = run.row()
    return run.client.read(read)


def rates(rewards: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return evaluation → mean reward of all held-out rollouts, and of each family's."""
    by_label: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rewards:
        for name in ("all", row["family"]):
            by_label[row["label"]][name].append(row["reward"])
    return {label: {name: round(fmean(of), 3) for name, of in found.items()} for label, found in by_label.items()}


class Bench:
    """The three runs on the stack in `home`; `found` is written to `out` after each."""

    def __init__(self, home: Path, steps: int, overrides: Sequence[str], out: Path) -> None:
        self.stack = Stack(home)
        self.client = Client(home)
        self.out = out
        self.train = write_rows(home / "train.jsonl", [with_wrong_tests(row) for row in rows_of("train")])
        self.heldout = write_rows(home / "heldout.jsonl", rows_of("heldout"))
        self.settings = [f"training.steps={steps}", *SETTINGS, *overrides]
        self.found: dict[str, Any] = {"commit": commit(), "wrong": FAMILIES[0], "settings": self.settings}

    def config(self, *more: str) -> RunConfig:
        config = load_config(ROOT / "configs" / "quickstart.yaml", [*self.settings, *more])
        paths = [self.train, self.heldout]
        datasets = [
            one.model_copy(update={"path": str(path)}) for one, path in zip(config.datasets, paths, strict=True)
        ]
        return config.model_copy(update={"datasets": datasets})

    def start(self, name: str, *more: str) -> Run:
        say(f"{name} begins")
        return self.client.train(self.config(*more), name, new=True, say=say)

    def record(self, name: str, values: dict[str, Any]) -> None:
        self.found[name] = values
        self.out.write_text(json.dumps(self.found, indent=2) + "\n")
        say(f"{name}: {json.dumps(values)}")

    def run_to_end(self, name: str, run: Run) -> None:
        with Meter(self.stack) as meter:
            run.wait(say)
        self.record(name, describe(run) | {"cost": meter.result()})

    def recall(self, faulty: Run) -> Run:
        """Mend the dataset and apply the recall."""
        write_rows(self.train, rows_of("train"))
        extent = faulty.recall(family=FAMILIES[0])
        with Meter(self.stack) as meter:
            new = faulty.apply_recall(extent, say)
        assert new is not None, "no step was trained on the family"
        regraded = {name: getattr(extent, name) for name in ("num_rollouts", "num_groups", "num_patches", "first_step")}
        self.record("recall", regraded | {"start_step": extent.start_step, "cost": meter.result()})
        return new

    def run(self) -> dict[str, Any]:
        bring_up(self.stack, self.config(), say)
        faulty = self.start("faulty")
        self.run_to_end("faulty", faulty)
        self.run_to_end("recalled", self.recall(faulty))
        self.run_to_end("clean", self.start("clean", "evaluation.at=[end]"))
        return self.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the config, of all three runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "bench" / "recall.json")
    parser.add_argument("--full", action="store_true", help="as without it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stack is stopped
    with tempfile.TemporaryDirectory(prefix="ratchet-recall-", ignore_cleanup_errors=True) as directory:
        home = Path(directory)
        home.chmod(0o755)  # the embedded Postgres runs as another user
        os.environ["RATCHET_HOME"] = str(home)
        free_ports(home)
        try:
            print_json(Bench(home, options.steps, options.set, options.out.absolute()).run())
        finally:
            down(boxes=True)


if __name__ == "__main__":
    main()
