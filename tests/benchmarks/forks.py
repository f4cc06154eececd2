"""Groups of forks against plain groups, at the same number of sampled tokens, in the simulation of the quickstart.

Half of the groups of a step are forks of plays of the step before, if there are any (`training.forks`): they begin with
the tokens of a play before one of its turns, and only what is sampled behind it is counted and trained. A run of forks
goes on until it has sampled as many tokens as the run of plain groups with its seed. The choice of the turn, the
advantages, the plan and the learner are the product's. All runs begin with the packaged policy; seeds differ in the
order of the tasks and in what is sampled. `shuffled` permutes the advantages within each group.

`ratchet admin bench forks` prints the solve rates before and after, and how many groups of both kinds had signal.
`-- --pipeline` makes one such pair through the whole pipeline instead (`_forks_pipeline.py`).
"""

import json
import random
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from cli.console import say
from examples.recipes import RECIPES
from examples.tiny_policy.bug_tasks import BugTask
from examples.tiny_policy.build import make_tiny_policy
from examples.tiny_policy.conversation import TURN_END, called_command, opening_text
from examples.tiny_policy.simulated_shell import run_command
from examples.tiny_policy.solve_tasks import Play, measure_solve_rate, sample_turns, take_turn
from ratchet import paths
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from scheduling.fork_selection import choose_turn
from scheduling.signal import has_signal
from store.arrays import logprobs_to_bytes
from store.forks import ForkableTurn
from tests.benchmarks._commit import commit
from tests.benchmarks._forks_pipeline import measure_pair
from tests.benchmarks.simulation import Case, Simulation, alone, evaluated

ARMS = {
    "plain": [],
    "uniform": ["training.forks.share=0.5"],
    "entropy": ["training.forks.share=0.5", "training.forks.turn=entropy"],
    "shuffled": ["training.forks.share=0.5", "training.advantage=shuffled"],
}
MAX_STEPS = 30
QUICKSTART = Path("configs/quickstart.yaml")


class Group(NamedTuple):
    """The plays of a group. `num_given`: the turns that a fork begins with, 0 of a plain group."""

    plays: list[Play]
    num_given: int


class ForkSimulation(Simulation):
    """`earlier`: the plain groups of the step before. `num_sampled`: tokens sampled in all steps so far."""

    def __init__(self, model_path: Path, config: RunConfig, case: Case) -> None:
        super().__init__(model_path, config, case)
        self.earlier: list[Group] = []
        self.num_sampled = 0
        self.counts: Counter[str] = Counter()

    def step(self, number: int) -> None:
        first = (number - 1) * self.config.training.groups_per_step
        groups = [self.new_group(first + at, task) for at, task in enumerate(self.next_tasks(number))]
        self.play_on(groups)
        for group in groups:
            kind = "forks" if group.num_given else "plain"
            self.counts[kind] += 1
            self.counts[f"{kind} with signal"] += has_signal([float(play.solved) for play in group.plays])
        self.earlier = [group for group in groups if not group.num_given]
        plays = [play for group in groups for play in group.plays]
        self.num_sampled += sum(sum(play.sampled) for play in plays)
        self.train(number, plays)

    def solve_rate(self) -> float:
        """Return the rate of sampled plays of tasks that no run trains."""
        return measure_solve_rate(self.play(evaluated(self.recipe, self.recipe.kinds[0]), 1.0))

    def new_group(self, number: int, task: BugTask) -> Group:
        """Return a group that has not been played yet, as `scheduling.fork_selection.with_forks` would make it."""
        size, forks = self.config.training.group_size, self.config.training.forks
        draw = random.Random(f"{self.config.seed}/forks/{number}")
        sources = [play for group in self.earlier for play in group.plays] if draw.random() < forks.share else []
        for source in draw.sample(sources, len(sources)):
            starts, ends = turns_of(source)
            logprobs = [source.logprobs[start:end] for start, end in zip(starts, ends, strict=True)]
            turns = [ForkableTurn(at, 0, False, logprobs_to_bytes(logprobs[at]), b"") for at in range(1, len(starts))]
            if turn := choose_turn(turns, forks.turn, draw):
                return Group([self.replayed(source, turn.id) for _ in range(size)], turn.id)
        return Group([self.opened(task) for _ in range(size)], 0)

    def opened(self, task: BugTask) -> Play:
        play = Play(task, [], dict(task.files))
        play.append(self.tokenizer.encode(opening_text(task)))
        return play

    def replayed(self, source: Play, num_turns: int) -> Play:
        """Return a play that has done again the source's first turns, as context."""
        starts, ends = turns_of(source)
        play = Play(source.task, [], dict(source.task.files))
        play.append(source.ids[: starts[num_turns]])
        for start, end in list(zip(starts, ends, strict=True))[:num_turns]:
            command = called_command(self.tokenizer.decode(source.ids[start : end - 1]))
            assert command is not None, "a turn behind it was sampled"
            run_command(command, play.files, dict(play.task.fixed_files))
        return play

    def play_on(self, groups: Sequence[Group]) -> None:
        """Sample all groups to their ends; the given turns count towards `harness.max_turns`."""
        self.policy.eval()
        sampling = self.config.sampling
        stop_id, pad_id = self.tokenizer.convert_tokens_to_ids([TURN_END, "<|endoftext|>"])
        for number in range(self.config.harness.max_turns or 0):
            left = (play for group in groups if number >= group.num_given for play in group.plays)
            if not (running := [play for play in left if not play.ended]):
                continue
            prompts = [play.ids for play in running]
            turns = sample_turns(self.policy, prompts, stop_id, pad_id, sampling.max_response_tokens, 1.0)
            for play, (ids, logprobs) in zip(running, turns, strict=True):
                play.append(ids, logprobs)
                take_turn(play, self.tokenizer, ids, stop_id)
        for group in groups:
            for play in group.plays:
                play.ended = True


def turns_of(play: Play) -> tuple[list[int], list[int]]:
    """Return the first position of each sampled turn, and the position behind its last one."""
    steps = np.diff(np.array(play.sampled, dtype=np.int8), prepend=0, append=0)
    return np.flatnonzero(steps == 1).tolist(), np.flatnonzero(steps == -1).tolist()


def load(arm: str, seed: int, overrides: Sequence[str]) -> ForkSimulation:
    config = load_config(QUICKSTART, [*overrides, *ARMS[arm], f"seed={seed}"])
    model_path = paths.cache() / "simulation" / "tiny-0"
    make_tiny_policy(model_path, 0, say, RECIPES[config.model])
    torch.manual_seed(seed)
    return ForkSimulation(model_path, config, Case(0, seed, arm == "shuffled"))


def simulate(arm: str, seed: int, budget: int | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Run until `budget` tokens are sampled, or for the config's steps without one."""
    simulation = load(arm, seed, overrides)
    number, last = 0, simulation.config.training.steps if budget is None else MAX_STEPS
    while number < last and (budget is None or simulation.num_sampled < budget):
        number += 1
        simulation.step(number)
    found = {"arm": arm, "seed": seed, "steps": number, "sampled_tokens": simulation.num_sampled}
    found |= {"groups": dict(simulation.counts), "solved": simulation.solve_rate()}
    say(str(found))
    return found


def make_pair(options: Namespace) -> None:
    def write(found: dict[str, Any]) -> None:
        say(str(found))
        if options.out:
            options.out.write_text(json.dumps(found, indent=2) + "\n")

    found = measure_pair(options.config, options.overrides, ARMS[options.arm], options.samples, write)
    json.dump(found, sys.stdout, indent=2)
    print()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--pipeline", action="store_true", help="one pair of runs with all real parts")
    parser.add_argument("--config", type=Path, default=QUICKSTART, help="of the pair")
    parser.add_argument("--arm", choices=[arm for arm in ARMS if ARMS[arm]], default="uniform", help="of the pair")
    parser.add_argument("--samples", type=int, default=2, help="of each held-out task of the pair")
    parser.add_argument("--out", type=Path, help="file for the pair's JSON so far")
    options = parser.parse_args()
    if options.pipeline:
        make_pair(options)
        return
    runs = []
    with alone():
        before = load("plain", 0, options.overrides).solve_rate()
        for seed in options.seeds:
            budget: int | None = None
            for arm in ARMS:
                runs.append(simulate(arm, seed, budget, options.overrides))
                budget = budget or runs[-1]["sampled_tokens"]
    solved = {arm: fmean(run["solved"] for run in runs if run["arm"] == arm) for arm in ARMS}
    found = {"commit": commit(), "overrides": options.overrides, "before": before, "solved": solved, "runs": runs}
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
