"""The quickstart without sandboxes and engine: simulated shell, sampling in this process, the real planner and learner.

Settings must be chosen on tasks that no evaluation uses, with many warm starts and controls, and one run of the real
pipeline takes twenty minutes. `ratchet admin bench simulation` runs one warm start, a run and a control; `--full` three
warm starts, with two of both. `python -m tests.benchmarks.simulation --set training.learning_rate=2e-4` tries other
values than the config's, and `--config configs/curriculum.yaml` another run.

The result is an estimate, for comparing settings: a task counts as solved if the files equal those of its fix. The
tasks and warm-start seeds are used here only.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.console import say
from examples.recipes import RECIPES
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.build import make_tiny_policy
from examples.tiny_policy.settings import Recipe
from examples.tiny_policy.solve_tasks import Play, measure_solve_rate, play_tasks
from ratchet import paths
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from scheduling.signal import has_signal
from store.training_groups import ReadyGroup, ReadyMember
from tests.benchmarks._commit import commit
from training.learner import RankLearner
from training.plan_builder import ChainLengths, draft_members, plan_members
from training.plan_types import Plan, TrainingSequence

WARM_START_SEEDS = (103, 104, 105)
"""None of these is used for the curve."""
NUM_EVALUATED, AT_ONCE = 360, 180


@dataclass(frozen=True)
class Case:
    """One simulated run. `repeat` numbers runs that differ only by chance."""

    warm_start: int
    repeat: int
    control: bool


class Simulation:
    """One run from a warm start. `policy` samples; after every step it has the weights that the learner published."""

    def __init__(self, model_path: Path, config: RunConfig, case: Case) -> None:
        self.config = config
        self.recipe = RECIPES[config.model]
        self.model_path = model_path
        self.learner = RankLearner(model_path, config)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        self.load(model_path)
        self.tasks = list(self.recipe.train_tasks())
        random.Random(f"{case.warm_start}/{case.repeat}").shuffle(self.tasks)

    def load(self, directory: Path) -> None:
        self.policy: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)

    def play(self, tasks: Sequence[BugTask], temperature: float) -> list[Play]:
        sampling, turns = self.config.sampling, self.config.harness.max_turns
        limits = {"max_turns": turns, "max_tokens_per_turn": sampling.max_response_tokens}
        return play_tasks(self.policy, self.tokenizer, tasks, temperature=temperature, **limits)

    def rates(self) -> dict[str, float]:
        """Return the solve rates by temperature, and by kind of family if there are several."""
        found = {}
        kinds = self.recipe.kinds
        for kind in kinds:
            tasks = evaluated(self.recipe, kind)
            parts = [tasks[start : start + AT_ONCE] for start in range(0, NUM_EVALUATED, AT_ONCE)]
            for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
                rate = measure_solve_rate([play for part in parts for play in self.play(part, temperature)])
                found[name if len(kinds) == 1 else f"{name}, {kind}"] = rate
        return found

    def step(self, number: int) -> None:
        """Sample and train one step of `groups_per_step` groups, with or without signal."""
        training = self.config.training
        tasks = self.next_tasks(number)
        plays = self.play(
            [task for task in tasks for _ in range(training.group_size)], self.config.sampling.temperature
        )
        self.train(number, plays)

    def next_tasks(self, number: int) -> list[BugTask]:
        count = self.config.training.groups_per_step
        return [self.tasks[((number - 1) * count + at) % len(self.tasks)] for at in range(count)]

    def train(self, number: int, plays: Sequence[Play]) -> None:
        """Train the plays of a step, which are in the order of their groups."""
        training = self.config.training
        first = (number - 1) * training.groups_per_step
        rows = [
            ReadyMember(rollout_id=at, grade_id=None, reward=float(play.solved), agent_exit=None, num_chains=1)
            for at, play in enumerate(plays)
        ]
        groups = [
            ReadyGroup(at, first + at, rows[at * training.group_size : (at + 1) * training.group_size])
            for at in range(training.groups_per_step)
        ]
        lengths = ChainLengths(
            {at: len(play.ids) for at, play in enumerate(plays)},
            {at: sum(play.sampled) for at, play in enumerate(plays)},
        )
        drafts = [draft_members(group, lengths, number, self.config) for group in groups if has_signal(group.rewards)]
        if len(drafts) < training.min_groups:
            return
        knobs = {"updates_per_step": training.updates_per_step, "learning_rate": training.learning_rate}
        plan = Plan(number, plan_members(drafts, number, self.config), number - 1, knobs, self.config.seed)
        trained = [member.rollout_id for member in plan.members if member.num_tokens > 0]
        self.learner.step(plan, [sequence(at, plays[at], number - 1) for at in trained])
        with tempfile.TemporaryDirectory() as directory:
            self.learner.publish(Path(directory) / "weights")
            self.load(Path(directory) / "weights")


def sequence(rollout_id: int, play: Play, version: int) -> TrainingSequence:
    """Return a play as one chain, up to its last sampled token."""
    mask = np.zeros(len(play.ids), dtype=np.bool_)
    behaviour = np.zeros(len(play.ids), dtype=np.float32)
    start = len(play.ids) - len(play.sampled)  # the opening
    mask[start:], behaviour[start:] = play.sampled, play.logprobs
    end = int(np.flatnonzero(mask)[-1]) + 1
    turns = np.cumsum(np.diff(mask, prepend=False) & mask)
    versions = np.where(mask, version, -1).astype(np.int32)
    arrays = (np.array(play.ids[:end], dtype=np.int32), mask[:end], behaviour[:end], turns[:end].astype(np.int64))
    return TrainingSequence(rollout_id, *arrays, 1.0, versions[:end])


def evaluated(recipe: Recipe, kind: str) -> list[BugTask]:
    tasks = recipe.new_tasks(random.Random("simulation"), kind)
    return [next(tasks) for _ in range(NUM_EVALUATED)]


def simulate(case: Case, overrides: Sequence[str], path: Path) -> dict[str, Any]:
    control = ["training.advantage=shuffled"] if case.control else []
    config = load_config(path, [*overrides, *control, f"seed={case.repeat}"])
    model_path = paths.cache() / "simulation" / f"{config.model}-{case.warm_start}"
    make_tiny_policy(model_path, case.warm_start, say, RECIPES[config.model])
    torch.manual_seed(hash((case.warm_start, case.repeat, case.control)))
    simulation = Simulation(model_path, config, case)
    before = simulation.rates()
    for number in range(1, config.training.steps + 1):
        simulation.step(number)
    after = simulation.rates()
    gained = {kind: after[kind] - before[kind] for kind in before}
    say(f"{case}: " + ", ".join(f"{kind} {before[kind]:.2f} -> {after[kind]:.2f}" for kind in before))
    return asdict(case) | {"before": before, "after": after, "gained": gained}


def spread(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean gain over these runs, and its standard deviation (None for a single run)."""
    gains = {kind: [run["gained"][kind] for run in runs] for kind in runs[0]["gained"]}
    return {
        kind: {"mean": fmean(values), "scatter": stdev(values) if len(values) > 1 else None}
        for kind, values in gains.items()
    }


def cases(full: bool, repeats: int) -> list[Case]:
    seeds = WARM_START_SEEDS if full else WARM_START_SEEDS[:1]
    return [Case(seed, repeat, control) for repeat in range(repeats) for seed in seeds for control in (False, True)]


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank with one compute thread, as the quickstart has."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()
    with alone():
        runs = [
            simulate(case, options.overrides, options.config)
            for case in cases(options.full, options.repeats or (2 if options.full else 1))
        ]
    found = {
        "commit": commit(),
        "overrides": options.overrides,
        "runs": runs,
        "gained": {
            name: spread([run for run in runs if run["control"] == control])
            for name, control in (("runs", False), ("controls", True))
        },
    }
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
