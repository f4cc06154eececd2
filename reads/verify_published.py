"""Recompute the result of published runs from their tables. Needs Python and pyarrow: `python verify.py`.

It checks that each token was trained once, with the weights and the logprob that it was sampled with, and that each
reward has its verdict; then it prints the curve of each run: the mean over the tasks of their mean reward, with a
bootstrap interval of 95%. The exit code is 1 if a check fails. `ratchet publish` copies this file.
"""

import json
import random
import statistics
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

_DRAWS = 10_000
_NUM_SHOWN = 5


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    return list(pq.read_table(folder / "tables" / f"{table}.parquet").to_pylist())


def tokens_trained_twice(folder: Path) -> Iterator[str]:
    """Yield rollouts and turns that two steps of a run have trained, and sampled tokens that two chains train."""
    steps = defaultdict(list)
    for batch in read(folder, "batch"):
        for member in json.loads(batch["members"]):
            steps[batch["run_id"], "rollout", member["rollout_id"]].append(batch["step"])
    for row in read(folder, "trained_turn"):
        steps[row["run_id"], "turn", row["turn_id"]].append(row["step"])
    for (run, kind, number), found in steps.items():
        if len(found) > 1:
            yield f"{run}: {kind} {number} is trained in the steps {found}"
    spans = defaultdict(list)
    for row in read(folder, "chain_span"):
        if row["trained"]:
            spans[row["turn_id"]].append((row["source_start"], row["source_start"] + row["length"]))
    for turn, ranges in spans.items():
        for (_, end), (start, _) in zip(sorted(ranges), sorted(ranges)[1:], strict=False):
            if start < end:
                yield f"turn {turn}: its tokens from {start} on are trained in two chains"


def tokens_of_unknown_origin(folder: Path) -> Iterator[str]:
    """Yield trained turns without the version or the logprob of each token, and plan rows with other numbers."""
    turns = {row["id"]: row for row in read(folder, "turn")}
    versions = {row["version"] for row in read(folder, "policy_version")}
    counts: dict[tuple[str, int, int], int] = defaultdict(int)
    for row in read(folder, "trained_turn"):
        values = struct.unpack(f"<{len(row['log_ratios']) // 2}e", row["log_ratios"])
        counts[row["run_id"], row["step"], row["rollout_id"]] += sum(one == one for one in values)
        turn = turns.get(row["turn_id"])
        if turn is None:
            yield f"turn {row['turn_id']} is trained and not published"
            continue
        number, spans = turn["num_sampled"], json.loads(turn["version_spans"] or "[]")
        edges = [0, *(one["end"] for one in spans)]
        if edges != [*(one["start"] for one in spans), number]:
            yield f"turn {turn['id']}: its versions {spans} do not cover its {number} tokens"
        if unknown := {one["version"] for one in spans} - versions:
            yield f"turn {turn['id']}: weights {sorted(unknown)} are not published"
        lengths = [len(turn[key] or b"") // 4 for key in ("sampled_ids", "logprobs")]
        if lengths != [number, number] or not turn["logprobs_valid"]:
            yield f"turn {turn['id']}: {number} tokens, but {lengths} ids and logprobs"
    for batch in read(folder, "batch"):
        for member in json.loads(batch["members"]) if batch["state"] == "committed" else []:
            rollout, planned = member["rollout_id"], member["num_tokens"]
            found = counts[batch["run_id"], batch["step"], rollout]
            if found != planned:
                name = f"{batch['run_id']}@{batch['step']}: rollout {rollout}"
                yield f"{name} has {found} trained tokens, planned: {planned}"


def rewards_without_verdict(folder: Path) -> Iterator[str]:
    """Yield trained rewards that are not the reward of their rollout, or not what its grade says."""
    rollouts = {row["id"]: row for row in read(folder, "rollout")}
    grades = {row["id"]: row for row in read(folder, "grade")}
    configs = {row["run_id"]: json.loads(row["config"]) for row in read(folder, "run")}
    for batch in read(folder, "batch"):
        grading = configs[batch["run_id"]].get("grading", {})
        for member in json.loads(batch["members"]):
            rollout, grade = rollouts.get(member["rollout_id"]), grades.get(member["grade_id"])
            name = f"{batch['run_id']}@{batch['step']}: rollout {member['rollout_id']}"
            if rollout is None or grade is None or grade["rollout_id"] != member["rollout_id"]:
                yield f"{name} has no published grade"
            elif rollout["grade_id"] == grade["id"] and rollout["reward"] != member["reward"]:
                yield f"{name} has reward {rollout['reward']}, trained with {member['reward']}"
            elif grading.get("reward", "solved") == "solved" and grade["rewards"] is None:
                said = float(grade["solved"] and not grade["rejected"])
                if said != member["reward"]:
                    yield f"{name} was trained with reward {member['reward']}, its grade says {said}"


CHECKS = {
    "each token is trained once": tokens_trained_twice,
    "each trained token has its version and logprob": tokens_of_unknown_origin,
    "each reward has its verdict": rewards_without_verdict,
}


def interval(values: list[float]) -> str:
    """Return mean and interval of the mean, by a seeded bootstrap over the tasks."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(_DRAWS))
    low, high = means[_DRAWS // 40], means[-_DRAWS // 40]
    return f"{statistics.fmean(values):+.3f} [{low:+.3f}, {high:+.3f}] over {len(values)} tasks"


def curves(folder: Path) -> Iterator[str]:
    """Yield a line per evaluation, and one for the difference of the last and the first of each temperature."""
    groups = (row for row in read(folder, "rollout_group") if row["purpose"] == "eval")
    labels = {row["id"]: (row["run_id"], row["label"]) for row in groups}
    rewards: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read(folder, "rollout"):
        if row["group_id"] in labels and row["reward"] is not None and row["replaced_by"] is None:
            rewards[labels[row["group_id"]]][row["task_id"]].append(row["reward"])
    series = defaultdict(list)
    for row in sorted(read(folder, "evaluation"), key=lambda row: row["step"]):
        means = {task: statistics.fmean(found) for task, found in rewards[row["run_id"], row["label"]].items()}
        if means:
            series[row["run_id"], row["temperature"]].append(means)
            name = f"{row['run_id']}@{row['step']} at temperature {row['temperature']:g}"
            yield f"{name}: {interval(list(means.values()))}"
    for (run, temperature), found in series.items():
        common = [found[-1][task] - found[0][task] for task in found[0].keys() & found[-1].keys()]
        if len(found) > 1 and common:
            yield f"{run}: last minus first at temperature {temperature:g}: {interval(common)}"


def main(folder: Path) -> int:
    faults = {title: list(check(folder)) for title, check in CHECKS.items()}
    for title, found in faults.items():
        print(f"{'FAILED' if found else 'ok'}: {title}", *found[:_NUM_SHOWN], sep="\n  ")
    print(*curves(folder), sep="\n")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent))
