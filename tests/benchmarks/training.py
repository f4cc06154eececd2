"""One training step on one batch: prefix trees against packed, separate and padded chains, and TRL's GRPO step.

The gain of shared prefixes depends on the shape of the batch, so every figure names it. `ratchet admin bench training
--json`, or `python -m tests.benchmarks.training [--full] [--device cuda]`.

Every way of computing runs in a new process for every case (memory that an earlier case left made the next up to 12%
faster), with the same random Qwen3, loss (dapo), threads, dtype and attention kernels. The ways take turns, step by
step. Figures are medians of two rounds, or of three if the first two differ. TRL runs with micro-batches of one and
of eight; the faster of the two in the first round is measured. Forward and backward are measured without the
optimiser's update, which is the same for all. On a CPU, whose cores may have other work, ratios are of CPU seconds
and of seconds, on a GPU of seconds. `--device cuda` adds realistic model sizes (`_sizes.py`) and leaves TRL out; it
needs only torch >= 2.11 and transformers.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stack.ports import free_port
from tests.benchmarks import _sizes
from tests.benchmarks._commit import commit
from tests.benchmarks._settings import settings
from training.plan_types import Member, TrainingSequence

VOCAB = 4096
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
WAYS = ("tree", "packed", "separate", "padded", "trl 1", "trl 8")
GRADIENT_SAMPLES = 1 << 22
"""Most entries of a gradient that two ways are compared by: those of 0.6B weights take seconds through a pipe."""
TRL_GROUP = 8
SAME_WITHIN = 1.05
"""No third round is run if the times of two differ by less than this factor."""
RECORDED = Path(__file__).with_name("recorded_trees.npz")


@dataclass(frozen=True)
class Case:
    """A shape of a batch. `branches`: lengths of what each sample adds to the shared prefix.

    A sample with several branches forks again, as an agent does. `trees`: groups, each with its own prefix.
    `bin_tokens`: most tokens of a bin; None: all are in one. `turn`: tokens of a turn in a branch, of which the last
    `untrained` are not sampled; 0: all are. `varies`: every step has lengths of its own, up to a fifth shorter.
    """

    name: str
    prefix: int
    trunk: int
    branches: int
    branch: int
    samples: int
    trees: int = 1
    bin_tokens: int | None = None
    untrained: int = 0
    turn: int = 0
    varies: bool = False
    synthetic = True

    def scaled(self, by: int) -> "Case":
        if by == 1:
            return self
        lengths = {"prefix": self.prefix // by, "trunk": self.trunk // by, "branch": self.branch // by}
        lengths |= {"turn": self.turn // by, "untrained": self.untrained // by}
        bin_tokens = None if self.bin_tokens is None else self.bin_tokens // by
        return replace(self, name=f"{self.name}, all lengths divided by {by}", bin_tokens=bin_tokens, **lengths)

    def chains(self, step: int = 0) -> list[TrainingSequence]:
        """Trained: what was sampled after the prefix; of a trunk with several branches, once."""
        random = np.random.default_rng(step if self.varies else 0)
        chains = []
        for sample in range(self.samples * self.trees):
            if sample % self.samples == 0:
                prefix = random.integers(0, VOCAB, self.prefix)
            trunk = random.integers(0, VOCAB, self.trunk)
            for branch in range(self.branches):
                length = self.branch - (random.integers(0, self.branch // 5) if self.varies else 0)
                ids = np.concatenate([prefix, trunk, random.integers(0, VOCAB, length)]).astype(np.int32)
                places = np.arange(len(ids))
                mask = places >= max(1, self.prefix + (self.trunk if branch else 0))
                if self.turn:
                    mask &= (places - self.prefix) % self.turn < self.turn - self.untrained
                behaviour = np.where(mask, -8.3 + 0.2 * random.standard_normal(len(ids)), 0).astype(np.float32)
                turns = np.full(len(ids), sample * 100 + branch, dtype=np.int64)
                chains.append(TrainingSequence(sample, ids, mask, behaviour, turns, 1.0))
        return chains


@dataclass(frozen=True)
class Recorded:
    """Trees that our adapter recorded (`_record_trees.py`), made smaller by leaving rollouts out."""

    name: str
    samples: int
    bin_tokens = None
    varies = False
    synthetic = False

    def scaled(self, by: int) -> "Recorded":
        kept = max(2, self.samples // by)
        return self if by == 1 else replace(self, name=f"{self.name}, the first {kept}", samples=kept)

    def chains(self, step: int = 0) -> list[TrainingSequence]:
        """Recorded logprobs are drawn anew around those of the random model, so that no ratio is far from 1."""
        stored, random = np.load(RECORDED), np.random.default_rng(0)
        ends = np.cumsum(stored["lengths"])
        chains = []
        for rollout, start, end in zip(stored["rollouts"].tolist(), ends - stored["lengths"], ends, strict=True):
            part = slice(int(start), int(end))
            mask = stored["mask"][part]
            behaviour = np.where(mask, -8.3 + 0.2 * random.standard_normal(len(mask)), 0).astype(np.float32)
            if rollout < self.samples:
                chains.append(
                    TrainingSequence(rollout, stored["ids"][part], mask, behaviour, stored["turns"][part], 1.0)
                )
        return chains


CASES: tuple[Case | Recorded, ...] = (
    Case("P=1536 S=512 G=8", 1536, 0, 1, 512, 8),
    Case("P=1920 S=128 G=8", 1920, 0, 1, 128, 8),
    Case("agent tree, synthetic: 768 + 8 x (128 + 3 x 128)", 768, 128, 3, 128, 8),
    Case("8 single chains of 2048", 0, 0, 1, 2048, 8),
    Recorded("trees recorded by the adapter: 8 rollouts, sub-agents, compaction", 8),
)

GPU_CASES = (
    Case("8 x (P=4096 + 16 turns of 96 + 160)", 4096, 0, 1, 4096, 8, turn=256, untrained=160),
    Case("8 x (P=4096 + 16 turns of 24 + 40)", 4096, 0, 1, 1024, 8, turn=64, untrained=40),
    Case("8 x (P=4096 + up to 16 turns of 96 + 160), new lengths", 4096, 0, 1, 4096, 8, 1, 65_536, 160, 256, True),
    Case("P=1536 S=512 G=8, one bin of 16384", 1536, 0, 1, 512, 8, bin_tokens=16_384),
    Case("8 x (P=1536 S=512 G=8), bins of 16384", 1536, 0, 1, 512, 8, trees=8, bin_tokens=16_384),
    Case("8 x (P=614 S=1434 G=8), bins of 16384", 614, 0, 1, 1434, 8, trees=8, bin_tokens=16_384),
    Case("8 x (agent tree, synthetic), bins of 16384", 768, 128, 3, 128, 8, trees=8, bin_tokens=16_384),
)
"""On a GPU a bin of few tokens waits for the host, so these fill bins."""


def members_of(chains: Sequence[TrainingSequence]) -> dict[int, Member]:
    total = sum(int(one.mask.sum()) for one in chains)
    rollouts = sorted({one.rollout_id for one in chains})
    return {n: Member(n, 0, None, 0.0, 1.0 if n % 2 else -0.5, 1, 0, 1 / total) for n in rollouts}


# ---------------------------------------------------------------- one way of computing, in a process of its own


class Ours:
    def __init__(self, way: str, model: Path, directory: Path, case: Case | Recorded) -> None:
        from training.learner import RankLearner

        self.case = case
        self.num_steps = self.computed_tokens = 0
        self.chains = case.chains()
        self.alone = way == "separate"
        self.members = members_of(self.chains)
        packing = "packed" if self.alone else way
        longest, total = max(len(one.ids) for one in self.chains), sum(len(one.ids) for one in self.chains)
        bin_tokens = longest if self.alone else case.bin_tokens or total
        self.learner = RankLearner(model, settings(packing=packing, bin_tokens=bin_tokens))

    def step(self) -> None:
        if self.case.varies and self.num_steps:
            self.chains = self.case.chains(self.num_steps)
        self.num_steps += 1
        self.learner.optimiser.zero_grad()
        self.computed_tokens = self.learner.accumulate(self.chains, self.members).computed_tokens

    def gradient(self) -> npt.NDArray[np.float32]:
        parameters = self.learner.policy.parameters()
        parts = [parameter.grad.full_tensor().flatten() for parameter in parameters]  # type: ignore[union-attr]
        every = -(-sum(map(len, parts)) // GRADIENT_SAMPLES)
        return np.concatenate([part[::every].float().cpu().numpy() for part in parts])

    def logprobs(self) -> npt.NDArray[np.float32]:
        """Return the logprob of every trained token, in order of (rollout, turn, token)."""
        import torch

        from training.packing import deal_bins, pack_bin
        from training.policy_inputs import make_inputs

        learner, found, order = self.learner, [], []
        bin_tokens = learner.config.training.bin_tokens
        packing, (dealt,) = deal_bins(self.chains, 1, bin_tokens, learner.packing, learner.cost)
        with torch.no_grad():
            for bin in (pack_bin(chains, packing) for chains in dealt):
                scores = learner.policy(make_inputs(bin, learner.device), 1.0)
                found.append(scores.logprobs.float().cpu().numpy()[bin.predictions])
                order.append(np.stack([bin.turn_ids, bin.behaviour]))
        keys = np.concatenate(order, axis=1)
        return np.concatenate(found)[np.lexsort((keys[1], keys[0]))]


class Trl:
    def __init__(self, way: str, model: Path, directory: Path, case: Case | Recorded) -> None:
        import warnings

        from tests.benchmarks._trl import TrlStep

        warnings.simplefilter("ignore")
        chains = case.chains()
        micro_batch = 1 if way == "trl 1" else TRL_GROUP
        self.trl = TrlStep(model, directory, micro_batch, TRL_GROUP, loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
        self.batch = self.trl.batch(chains, members_of(chains))

    def step(self) -> None:
        self.trl.gradients(self.batch)

    def gradient(self) -> npt.NDArray[np.float32]:
        return self.trl.gradient().numpy()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _reset_peak() -> int:
    """Set the resident size now as the base of the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def work(pipe: Connection, way: str, model: Path, directory: Path, threads: int) -> None:
    """Answer "case" with gradient and logprobs of a step, and "step" with seconds, CPU seconds and extra peak bytes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if not way.startswith("trl"):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    engine: Ours | Trl | None = None
    while (asked := pipe.recv()) is not None:
        if asked == "step":
            assert engine is not None
            before, start, cpu = _reset_peak(), time.perf_counter(), time.process_time()
            engine.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            computed = engine.computed_tokens if isinstance(engine, Ours) else 0
            pipe.send(Step(time.perf_counter() - start, time.process_time() - cpu, _peak_bytes() - before, computed))
        else:
            engine = (Trl if way.startswith("trl") else Ours)(way, model, directory, asked)
            engine.step()
            pipe.send((engine.gradient(), engine.logprobs() if isinstance(engine, Ours) else None))
    if dist.is_initialized():
        dist.destroy_process_group()


class Worker:
    def __init__(self, way: str, model: Path, directory: Path, threads: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["training.learner", "transformers.models.qwen3.modeling_qwen3", "tests.benchmarks._trl"]
        )
        self.way = way
        (self.pipe, theirs) = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, way, model, directory / way.replace(" ", "-"), threads), daemon=True
        )
        self.process.start()
        theirs.close()  # so that the death of a process is seen as end of file

    def ask(self, question: Any) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


# ---------------------------------------------------------------- figures


class Step(NamedTuple):
    """One measured step. `peak`: highest resident bytes above those before the step. `computed`: tokens of its bins."""

    seconds: float
    cpu_seconds: float
    peak: int
    computed: int

    def of(self, measure: str) -> float:
        return self.seconds if measure == "seconds" else self.cpu_seconds


def make_model(directory: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.standins.tiny_model import make_tokenizer

    torch.manual_seed(0)
    make_tokenizer(directory)
    settings = Qwen3Config(
        vocab_size=VOCAB, head_dim=32, max_position_embeddings=32768, tie_word_embeddings=False, **SHAPE
    )
    Qwen3ForCausalLM(settings).save_pretrained(directory)
    return directory


def take_turns(
    case: Case | Recorded, workers: Sequence[Worker], rounds: int | None, measure: str
) -> dict[str, list[Step]]:
    """Run the steps of all ways interleaved, every second round in reverse. `rounds` None: two or three."""
    times: dict[str, list[Step]] = {worker.way: [] for worker in workers}
    running = list(workers)
    for number in range(rounds or 3):
        for worker in running if number % 2 == 0 else reversed(running):
            times[worker.way].append(worker.ask("step"))
        print(f"{case.name}: round {number + 1}", file=sys.stderr)
        if number == 0:
            trl = sorted((way for way in times if way.startswith("trl")), key=lambda way: times[way][0].of(measure))
            running = [worker for worker in workers if worker.way not in trl[1:]]
        found = [[step.of(measure) for step in times[worker.way]] for worker in running]
        if rounds is None and number > 0 and all(max(one) < SAME_WITHIN * min(one) for one in found):
            break
    return times


def run_case(case: Case | Recorded, workers: Sequence[Worker], rounds: int | None, measure: str) -> dict[str, Any]:
    shares = {worker.way: worker.ask(case) for worker in workers}
    times = take_turns(case, workers, rounds, measure)
    gradient, logprobs = shares.get("separate") or shares["packed"]
    chains = case.chains()
    chain_tokens = sum(len(one.ids) for one in chains)
    ways = {}
    for way, steps in times.items():
        seconds, cpu = median(step.seconds for step in steps), median(step.cpu_seconds for step in steps)
        ways[way] = {
            "rounds": len(steps),
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu, 3),
            "chain_tokens_per_second": round(chain_tokens / seconds),
            "chain_tokens_per_cpu_second": round(chain_tokens / cpu),
            "computed_tokens": steps[-1].computed,
            "peak_extra_mib": round(max(step.peak for step in steps) / 2**20),
            "max_abs_logprob_difference": None
            if shares[way][1] is None
            else float(np.abs(shares[way][1] - logprobs).max()),
            "relative_gradient_error": float(np.linalg.norm(shares[way][0] - gradient) / np.linalg.norm(gradient)),
        }
    measures = ("cpu_seconds", "seconds") if measure == "cpu_seconds" else ("seconds",)
    against = {one: _ratios(ways, one) for one in measures}
    trained = sum(int(one.mask.sum()) for one in chains)
    facts = {
        "chains": len(chains),
        "chain_tokens": chain_tokens,
        "trained_tokens": trained,
        "synthetic": case.synthetic,
    }
    print(
        f"{case.name}: {against}", file=sys.stderr
    )  # the result so far, if the time limit of the machine ends the run
    return {"case": case.name, **facts, "ratios": against, "ways": ways}


def _ratios(ways: Mapping[str, dict[str, Any]], measure: str) -> dict[str, float]:
    """Return how many times longer than the tree each way took."""
    tree = ways["tree"][measure]
    found = {
        f"tree_over_{way}": round(ways[way][measure] / tree, 2)
        for way in ("packed", "auto", "separate", "padded")
        if way in ways
    }
    trl = [ways[way][measure] for way in ways if way.startswith("trl")]
    return found | ({"tree_over_best_trl": round(min(trl) / tree, 2)} if trl else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="seven rounds in place of two or three")
    parser.add_argument("--rounds", type=int, help="in place of two or three, or of seven")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--only", type=int, action="append", choices=range(len(CASES)), help="number of a case; may be given again"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="which of them; tree and separate are needed")
    parser.add_argument(
        "--size",
        choices=[*_sizes.SIZES],
        action="append",
        help="of a model, and nothing else; on a GPU both unless named",
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="divides all lengths, for a machine with little time; figures then name it"
    )
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(Path(temporary))
        ways = [way for way in options.ways.split(",") if options.device == "cpu" or not way.startswith("trl")]
        chosen = options.only or ([] if options.size else range(len(CASES)))
        cases = [CASES[number].scaled(options.scale) for number in chosen]
        rounds = options.rounds or (7 if options.full else None)
        measure = "cpu_seconds" if options.device == "cpu" else "seconds"
        results = []
        for case in cases:
            workers = [Worker(way, model, Path(temporary), options.threads) for way in ways]
            results.append(run_case(case, workers, rounds, measure))
            for worker in workers:
                worker.end()
    sizes = options.size or (["0.6B", "4B"] if options.device == "cuda" and not options.only else [])
    at_size = [found for size in sizes for found in _sizes.measure(size, rounds or 3)]
    machine = {
        "device": options.device,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    machine |= {"threads": options.threads, "load_at_start": before, "load_at_end": os.getloadavg()[0]}
    setting = {"commit": commit(), **machine, "dtype": "float32", "model": SHAPE}
    print(json.dumps({**setting, "cases": results, "sizes": at_size}, indent=2))


if __name__ == "__main__":
    # By module name, so that child processes find the same classes.
    sys.path.insert(0, os.getcwd())
    from tests.benchmarks.training import main as named_main

    named_main()
