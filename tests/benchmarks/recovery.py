r"""The cost of faults: each part killed, suspended, cut off or lost, alone and in pairs, with 16 live rollouts.

The stack is real (`_recovery_stack.py`); the policy's choices are scripted, so that verdicts are a function of seed,
task and member. The run first works undisturbed until every member of every task has a verdict; then one fault after
the other hits it. After each, the rollouts that were live are compared with what the engine saw, with the undisturbed
verdicts and with the provider's boxes
(`_recovery_evidence.py`). Exit code 1 if something was lost, doubled, invented or left behind.

    ratchet admin bench recovery
    python -m tests.benchmarks.recovery --faults "kill adapter,kill engine" --seed 7 --rollouts 16
    python -m tests.benchmarks.recovery --faults "sandbox service away for 75 minutes" --rollouts 60 --in-flight 200 \
        --slowness 10
"""

import argparse
import asyncio
import os
import platform
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import orjson

from cli.console import say
from client.steering import steer_run
from ratchet.errors import RatchetError
from ratchet.types import SteeringAction
from tests.benchmarks._commit import commit
from tests.benchmarks._recovery_effective import measure_effective_time
from tests.benchmarks._recovery_evidence import (
    Findings,
    begun_again,
    count_tokens,
    examine,
    leaked_boxes,
    read_calls,
    trained_twice,
    unstored_turns,
)
from tests.benchmarks._recovery_faults import PROGRESS, Fault, Injury, long_faults, pair_faults, single_faults
from tests.benchmarks._recovery_stack import GROUP_SIZE, NUM_TASKS, Recovery
from tests.chaos.faults import wait_until
from tests.chaos.machine_faults import MissingPrivilegeError, list_boxes

_ENDLESS_STEPS = 100_000
_MOMENT_SECONDS = 3.0
_EFFECTIVE = "effective"


@dataclass
class Row:
    """The effect of one fault on the rollouts that were live. Seconds count from the end of the outage that it caused.

    `resumed`: the reason of a pause that the fault may cause and that the bench has ended, as an operator would.
    """

    fault: str
    live: int = 0
    outage_seconds: float = 0.0
    tokens_again: int = 0
    tokens_in_flight: int = 0
    boxes_ended: int = 0
    from_zero: int = 0
    duplicates: int = 0
    missing: int = 0
    wrong: int = 0
    invented: int = 0
    bias: float = 0.0
    leaked_boxes: int = 0
    progress_seconds: float | None = None
    settled_seconds: float | None = None
    violations: list[str] = field(default_factory=list)
    skipped: str = ""
    resumed: str = ""


class Bench:
    def __init__(self, recovery: Recovery, seed: int, sabotage: bool) -> None:
        self.recovery = recovery
        self.seed = seed
        self.sabotage = sabotage
        self.undisturbed: dict[tuple[str, int], float] = {}

    def pass_undisturbed(self) -> dict[str, Any]:
        """Start the run and let it work without faults until every member of every task has a reward."""
        recovery = self.recovery
        recovery.start(_ENDLESS_STEPS)
        wait_until(lambda: len(self._rewarded()) == NUM_TASKS * GROUP_SIZE, "every member has a reward", 1200)
        wait_until(lambda: bool(recovery.store.value("SELECT sum(step) FROM run")), "a step is trained", 600)
        self.undisturbed = self._rewarded()
        return {"members": len(self.undisturbed), "solved_share": fmean(self.undisturbed.values())}

    def _rewarded(self) -> dict[tuple[str, int], float]:
        """Return (task, member) → reward of the first members of all tasks."""
        rows = self.recovery.store.rows(
            "SELECT k.label, r.member, r.reward FROM rollout r JOIN task k ON k.id = r.task_id"
            " WHERE r.run_id = $1 AND r.reward IS NOT NULL AND r.member < $2 ORDER BY r.id",
            self.recovery.run_id,
            GROUP_SIZE,
        )
        found: dict[tuple[str, int], float] = {}
        for row in rows:
            known = found.setdefault((row["label"], row["member"]), row["reward"])
            assert known == row["reward"], f"{dict(row)}: the undisturbed run contradicts itself"
        return found

    # ------------------------------------------------------------ one fault

    def measure(self, fault: Fault) -> Row:
        recovery = self.recovery
        rng = random.Random(f"{self.seed}/{fault.name}")
        recovery.wait_until_steady()
        fault.prepare(recovery)
        live = fault.judged(recovery)
        row, injury = Row(fault.name, len(live)), Injury(time.time())
        try:
            fault.inject(recovery, injury, rng)
        except MissingPrivilegeError as error:
            row.skipped = str(error)
            return row
        injury.ended_at = time.time()
        row.outage_seconds = round(injury.outage_seconds, 1)
        over_at = injury.began_at + injury.outage_seconds
        row.progress_seconds = self._wait_for_progress(row, fault, over_at)
        row.settled_seconds = self._wait_for_rollouts(row, fault, live, over_at)
        recovery.sweep()
        if self.sabotage:
            _sabotage(recovery, live)
        self._judge(row, injury, live)
        return row

    def _wait_for_progress(self, row: Row, fault: Fault, over_at: float) -> float | None:
        deadline = time.time() + self.recovery.settle_seconds
        while time.time() < deadline:
            self._resume_if_paused(row, fault)
            first = self.recovery.store.value(PROGRESS[fault.work], over_at)
            if first is not None:
                return round(first.timestamp() - over_at, 1)
            time.sleep(0.5)
        row.violations.append(f"no {fault.work} within {self.recovery.settle_seconds:.0f} s")
        return None

    def _wait_for_rollouts(self, row: Row, fault: Fault, live: list[int], over_at: float) -> float | None:
        deadline = time.time() + self.recovery.settle_seconds
        while time.time() < deadline:
            self._resume_if_paused(row, fault)
            if self.recovery.num_ended(live) == len(live):
                return round(time.time() - over_at, 1)
            time.sleep(0.5)
        row.violations.append(f"rollouts are still open after {self.recovery.settle_seconds:.0f} s")
        return None

    def _resume_if_paused(self, row: Row, fault: Fault) -> None:
        state, reason = self.recovery.state()
        if state != "running":
            if state == "paused" and fault.may_pause and fault.may_pause in reason:
                row.resumed = reason
            else:
                row.violations.append(f"the run is {state}: {reason}")
            asyncio.run(steer_run(self.recovery.stack, SteeringAction.RESUME, self.recovery.run_id, by="the benchmark"))

    # ------------------------------------------------------------ judging

    def _judge(self, row: Row, injury: Injury, live: list[int]) -> None:
        recovery = self.recovery
        calls = read_calls(recovery.stack.engine_log)
        unstored = unstored_turns(recovery.store, live, injury.began_at)
        tokens = count_tokens(calls, unstored, injury.began_at, injury.ended_at, time.time())
        found = examine(recovery.store, calls, live, self.seed, self.undisturbed)
        hit = recovery.store.rows(
            "SELECT DISTINCT rollout_id FROM sandbox WHERE provider_id = ANY($1::text[])", list(injury.boxes)
        )
        leaked = leaked_boxes(recovery.store, list_boxes(recovery.stack))
        if leaked:  # a box that was being ended is gone after a moment
            time.sleep(_MOMENT_SECONDS)
            leaked = sorted(set(leaked) & set(leaked_boxes(recovery.store, list_boxes(recovery.stack))))
        from_zero = begun_again(recovery.store, calls, injury.began_at)
        needless = from_zero - {one[0] for one in hit}
        row.tokens_again = tokens.again
        row.tokens_in_flight = tokens.in_flight
        row.boxes_ended = len(injury.boxes)
        row.from_zero = len(from_zero)
        row.leaked_boxes = len(leaked)
        _take_findings(row, found)
        if tokens.again > tokens.in_flight:
            row.violations.append(f"{tokens.again} tokens generated again, {tokens.in_flight} were in flight")
        if needless:
            row.violations.append(f"from zero although the box lived: rollouts {sorted(needless)}")
        if leaked:
            row.violations.append(f"boxes without an owner after a sweep: {leaked}")

    def judge_run(self) -> Row:
        """Judge every rollout of the run that has ended, and what was trained."""
        recovery = self.recovery
        rows = recovery.store.rows(
            "SELECT id FROM rollout WHERE run_id = $1 AND outcome IS NOT NULL ORDER BY id", recovery.run_id
        )
        ended = [row[0] for row in rows]
        row = Row("the whole run", len(ended))
        calls = read_calls(recovery.stack.engine_log)
        found = examine(recovery.store, calls, ended, self.seed, self.undisturbed)
        found.duplicates += trained_twice(recovery.store, recovery.run_id)
        _take_findings(row, found)
        return row


def _take_findings(row: Row, found: Findings) -> None:
    row.duplicates = len(found.duplicates)
    row.missing = len(found.missing)
    row.wrong = len(found.wrong)
    row.invented = len(found.invented)
    row.bias = round(found.bias, 4)
    row.violations += [*found.duplicates, *found.missing, *found.wrong, *found.invented]


def _sabotage(recovery: Recovery, live: list[int]) -> None:
    """Turn one reward round in the store, to show that the benchmark finds it."""
    recovery.store.rows("UPDATE rollout SET reward = 1 - reward WHERE id = $1 RETURNING id", live[0])


# ---------------------------------------------------------------- the program


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="accepted for symmetry; every fault is run anyway")
    parser.add_argument(
        "--faults", help=f"names, separated by commas, and {_EFFECTIVE!r}; all but those of over an hour if left out"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the order, the pairs, the boxes and the verdicts")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts in boxes before each fault")
    parser.add_argument("--in-flight", type=int, default=0, help="rollouts with a workflow before each fault")
    parser.add_argument("--slowness", type=float, default=1.0, help="model calls take so many times as long")
    parser.add_argument("--minutes", type=float, default=120.0, help="faults that would begin later are left out")
    parser.add_argument("--sabotage", action="store_true", help="falsify one reward after each fault: must be found")
    parser.add_argument(
        "--allow-skipped", action="store_true", help="a fault that this machine cannot make is no error"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the faults and end")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Fault]:
    known = single_faults() | pair_faults(options.seed)
    if options.faults is None:
        found = list(known.values())
        random.Random(options.seed).shuffle(found)
        return found
    known |= long_faults()
    names = [name.strip() for name in options.faults.split(",") if name.strip() != _EFFECTIVE]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--faults {unknown[0]!r}: unknown; `--list` prints the names")
    return [known[name] for name in names]


def _is_up_again(recovery: Recovery) -> bool:
    try:
        recovery.up()
    except RatchetError as error:
        say(f"the stack does not start: {error}")
        return False
    return True


def _report(row: Row) -> None:
    again = f"{row.tokens_again} of {row.tokens_in_flight} tokens again, {row.from_zero} from zero"
    verdict = f"SKIPPED: {row.skipped}" if row.skipped else "; ".join(row.violations) or "nothing lost"
    say(f"{row.fault}: {row.live} live; {again}; progress after {row.progress_seconds} s; {verdict}")


def run_bench(options: argparse.Namespace) -> dict[str, Any]:
    faults = _chosen(options)
    recovery = Recovery.make(options.seed, options.rollouts, options.in_flight, options.slowness)
    bench = Bench(recovery, options.seed, options.sabotage)
    started, load = time.time(), os.getloadavg()[0]
    rows: list[Row] = []
    effective: dict[str, Any] = {}
    try:
        recovery.up()
        undisturbed = bench.pass_undisturbed()
        say(f"undisturbed: {undisturbed}")
        for fault in faults:
            if time.time() - started > 60 * options.minutes:
                rows.append(Row(fault.name, skipped=f"{options.minutes:g} minutes were over"))
                continue
            try:
                rows.append(bench.measure(fault))
            except (AssertionError, RatchetError) as error:
                rows.append(Row(fault.name, violations=[f"{type(error).__name__}: {error}"]))
                wait_until(lambda: _is_up_again(recovery), "the stack is up again", 120)
            _report(rows[-1])
        if options.faults is None or _EFFECTIVE in options.faults:
            recovery.wait_until_steady()
            effective = measure_effective_time(recovery, options.seed)
        rows.append(bench.judge_run())
        _report(rows[-1])
    finally:
        recovery.end()
    machine = {"cores": len(os.sched_getaffinity(0)), "kernel": platform.release(), "load_before": round(load, 2)}
    return {
        "commit": commit(),
        "machine": machine,
        "seed": options.seed,
        "slowness": options.slowness,
        "seconds": round(time.time() - started),
        "undisturbed": undisturbed,
        "faults": [asdict(row) for row in rows],
        "effective_training_time": effective,
        "violations": sum(len(row.violations) for row in rows),
    }


def main() -> None:
    options = _options()
    if options.list:
        print("\n".join(single_faults() | pair_faults(options.seed) | long_faults()))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the stack is ended then, too
    found = run_bench(options)
    sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.flush()
    num_skipped = sum(bool(row["skipped"]) for row in found["faults"])
    if found["violations"] or (num_skipped and not options.allow_skipped):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
