"""vLLM and the learner on one GPU: `python -m tests.benchmarks.gpu_loop`, ten steps with weight updates in flight.

A step trains the calls that have ended since the step before, publishes the weights as a run does, and loads them into
the engine while calls are in flight. Without agents, boxes and the store, so that the figures are those of the GPU:

- `pause`: seconds in which the engine is paused for an update (`engine/weight_update.py:replace_weights`)
- `check`: seconds before the pause in which the engine compares the digests of the files, while calls go on
- `longest_gap_…`: the longest time without a token of a call, during updates and between them; the client shares its
  process with the learner, so a gap also has what the learner holds it for
- `mixed_calls`: calls whose tokens were sampled by more than one version
- `canary`: mean |engine - learner| in nats per token, of every version that was loaded
- tokens per second of the engine, seconds of a training step and of publishing

Weights are random: a tiny Qwen3 in float32, and one of 0.6B in bfloat16. Adam moves them far enough that the canary
tells each version from the one before. Prints JSON, and each update and size to standard error as soon as it exists, so
that a short loan of a card still gives what was measured. `--cpu-toy` runs the tiny size on a CPU.
"""

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine import policy_files
from engine.client import EngineClient, IdsText, Sampling
from engine.generation import Generation, SampledTokens
from engine.process import EngineSettings, vllm_process
from engine.weight_update import load_from_files, replace_weights, score_canary
from ratchet.config import RunConfig
from ratchet.types import JsonObject
from stack.ports import free_port
from store.engines import PublishedPolicy
from tests.benchmarks import _sizes
from tests.benchmarks._commit import commit
from tests.cpu_vllm import wait_until_healthy
from tests.standins.tiny_model import make_tokenizer, make_weights
from training.plan_types import Member, TrainingSequence

STEPS = 10
PROMPT_TOKENS = 32
LEARNING_RATE = 1e-3


@dataclass(slots=True, frozen=True)
class Size:
    """`calls`: in flight at once; `tokens`: of an answer. `memory`: share of the GPU that vLLM takes."""

    name: str
    dtype: str
    calls: int
    tokens: int
    memory: float

    def make(self, directory: Path) -> None:
        """Write tokenizer and random weights."""
        make_tokenizer(directory)
        if self.name == "tiny":
            make_weights(directory)
            return
        with _sizes.random_model(self.name) as model:
            shutil.copytree(model, directory, dirs_exist_ok=True)


GPU_SIZES = (Size("tiny", "float32", 32, 512, 0.2), Size("0.6B", "bfloat16", 32, 512, 0.3))
CPU_SIZES = (Size("tiny", "float32", 4, 64, 0.0),)


@dataclass(slots=True, eq=False)
class Call:
    """One call of the engine. `came_at`: when its tokens came, in chunks."""

    prompt: list[int]
    sampled: SampledTokens
    came_at: list[float] = field(default_factory=list)
    generation: Generation | None = None

    def sequence(self, number: int) -> TrainingSequence:
        """Return the call as a chain that is trained; `number` stands for its rollout."""
        assert self.generation is not None
        ids = np.array([*self.prompt, *self.generation.token_ids], np.int32)
        mask = np.arange(len(ids)) >= len(self.prompt)
        behaviour = np.zeros(len(ids), np.float32)
        behaviour[mask] = self.generation.logprobs
        return TrainingSequence(number, ids, mask, behaviour, np.zeros(len(ids), np.int64), 1.0)


class Traffic:
    """Keeps `size.calls` calls in flight."""

    def __init__(self, client: EngineClient, size: Size) -> None:
        self.client = client
        self.size = size
        self.version: str | None = None
        self.random = np.random.default_rng(0)
        self.ended: list[Call] = []
        self.num_tokens = 0
        self._numbers = itertools.count()

    async def keep(self) -> None:
        """Replace each call that ends by a new one, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.size.calls):
                group.create_task(self._repeat())

    async def _repeat(self) -> None:
        sampling = Sampling(max_tokens=self.size.tokens, temperature=1.0)
        while True:
            prompt = self.random.integers(0, 600, PROMPT_TOKENS).tolist()
            call = Call(prompt, SampledTokens(lambda ids: self._note(call, ids)))  # noqa: B023 (of this call only)
            name = f"call-{next(self._numbers)}"
            await self.client.stream(IdsText.of(prompt), sampling, name, self.version, call.sampled)
            call.generation = call.sampled.generation()
            self.ended.append(call)

    def _note(self, call: Call, ids: Sequence[int]) -> None:
        call.came_at.append(time.monotonic())
        self.num_tokens += len(ids)

    async def take(self, at_least: int) -> list[Call]:
        """Return the calls that have ended, waiting until there are so many."""
        while len(self.ended) < at_least:
            await asyncio.sleep(0.02)
        found = self.ended
        self.ended = []
        return found


class Learner:
    """The learner of one rank in this process, and the directory of its versions."""

    def __init__(self, model: Path, root: Path, size: Size) -> None:
        import torch.distributed as dist

        from training.learner import RankLearner

        dist.init_process_group(init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        config = RunConfig.model_validate(
            {
                "datasets": [{"path": "unused.jsonl"}],
                "training": {"learning_rate": LEARNING_RATE, "dtype": size.dtype, "bin_tokens": 16_384},
                "sampling": {
                    "max_context_tokens": PROMPT_TOKENS + size.tokens + 256,
                    "max_response_tokens": size.tokens,
                },
            }
        )
        self.learner = RankLearner(model, config)
        self.root = root

    def train(self, calls: Sequence[Call]) -> None:
        """Make one update with advantages of both signs."""
        chains = [call.sequence(number) for number, call in enumerate(calls)]
        num_tokens = sum(int(chain.mask.sum()) for chain in chains)
        members = {n: Member(n, 0, None, 0.0, (-1.0) ** n, 1, 0, 1 / num_tokens) for n in range(len(chains))}
        self.learner.accumulate(chains, members)
        self.learner._update()

    def publish(self, step: int) -> PublishedPolicy:
        directory = self.root / f"{step}.e1"
        files = self.learner.publish(directory)
        return PublishedPolicy(f"run@{step}", str(directory), files, self.learner.canary())


@dataclass(slots=True)
class Times:
    """Seconds of each step, and what was seen of the calls. `updates`: begin and end of each."""

    train: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    check: list[float] = field(default_factory=list)
    canary: list[float] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    mixed: int = 0
    calls: int = 0

    def add_calls(self, calls: Sequence[Call]) -> None:
        """Count calls that have ended, and their times without a token, during updates and between them."""
        self.calls += len(calls)
        for call in calls:
            assert call.generation is not None
            self.mixed += len({span["version"] for span in call.generation.version_spans}) > 1
            for start, end in itertools.pairwise(call.came_at):
                meets = any(start < until and end > since for since, until in self.updates)
                (self.during if meets else self.between).append(end - start)

    def summary(self) -> JsonObject:
        pauses = [end - start for start, end in self.updates]
        found: JsonObject = {name: round(median(getattr(self, name)), 4) for name in ("train", "publish", "check")}
        for name, values in (("pause", pauses), ("canary", self.canary)):
            found[name] = {"median": round(median(values), 4), "highest": round(max(values), 4)}
        for name, values in (("during_updates", self.during), ("between", self.between)):
            found[f"longest_gap_{name}"] = round(max(values, default=0.0), 4)
        return found | {"mixed_calls": self.mixed, "calls": self.calls}


async def measure(size: Size, home: Path, on_gpu: bool, extra_args: Sequence[str]) -> JsonObject:
    root = home / "policies"
    base = root / "0.e0"
    size.make(base)
    room = ("--gpu-memory-utilization", str(size.memory)) if on_gpu else ("--enforce-eager",)
    of_cpu = {} if on_gpu else {"kv_cache_gib": 1, "num_threads": 1}
    settings = EngineSettings(
        model_path=base,
        port=free_port(),
        database_url="",
        state_dir=home,
        policies_root=root,
        dtype=size.dtype,
        max_model_len=PROMPT_TOKENS + size.tokens + 256,
        max_num_seqs=size.calls + 1,
        args=[*room, *extra_args],
        **of_cpu,
    )
    async with vllm_process(settings, base) as process, EngineClient(settings.address, 600) as client:
        await wait_until_healthy(client, process)
        await client.init_weight_transfer(str(root))
        learner = await asyncio.to_thread(Learner, base, root, size)
        return await _steps(client, learner, size, root)


async def _steps(client: EngineClient, learner: Learner, size: Size, root: Path) -> JsonObject:
    traffic, times = Traffic(client, size), Times()
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:  # a call that fails ends the steps
        keeping = group.create_task(traffic.keep())
        before: JsonObject | None = None
        for step in range(1, STEPS + 1):
            calls = await traffic.take(size.calls)
            times.add_calls(calls)
            times.train.append(await _timed(asyncio.to_thread(learner.train, calls[: size.calls])))
            begun = time.monotonic()
            version = await asyncio.to_thread(learner.publish, step)
            times.publish.append(time.monotonic() - begun)
            transfer = load_from_files(version, root)
            times.check.append(await _timed(client.check_files(transfer.files, transfer.sha256)))
            begun = time.monotonic()
            await replace_weights(client, version.version, transfer)
            times.updates.append((begun, time.monotonic()))
            traffic.version = version.version
            assert version.canary is not None
            verdict = await score_canary(client, version.canary, before)
            assert verdict.reason is None, verdict.reason
            times.canary.append(verdict.mean_gap)
            begin, end = times.updates[-1]
            found = {"size": size.name, "step": step, "pause": round(end - begin, 4), "canary": verdict.mean_gap}
            print(json.dumps(found), file=sys.stderr, flush=True)
            before = version.canary
        times.add_calls(await traffic.take(size.calls))
        seconds = time.monotonic() - started
        keeping.cancel()
    num_bytes = sum(file["bytes"] for file in policy_files.weight_files(version.files))
    rate = round(traffic.num_tokens / seconds, 1)
    return times.summary() | {"engine_tokens_per_second": rate, "version_bytes": num_bytes, "steps": STEPS}


async def _timed(work: Any) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-toy", action="store_true", help="the tiny size on a CPU, with few calls")
    parser.add_argument("--enforce-eager", action="store_true", help="vLLM without compilation and CUDA graphs")
    options = parser.parse_args()
    on_gpu = not options.cpu_toy
    if options.cpu_toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none; use --cpu-toy to see whether it works")
    os.environ["HF_HUB_OFFLINE"] = "1"
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to its standard output, which is this process's
    results = []
    extra_args = ["--enforce-eager"] if options.enforce_eager and on_gpu else []
    for size in GPU_SIZES if on_gpu else CPU_SIZES:
        with tempfile.TemporaryDirectory() as directory:
            measured = asyncio.run(measure(size, Path(directory), on_gpu, extra_args))
        found = {"size": size.name, "dtype": size.dtype} | measured
        print(json.dumps(found), file=sys.stderr, flush=True)
        torch.distributed.destroy_process_group()
        results.append(found)
    card = torch.cuda.get_device_name() if on_gpu else None
    found = {"commit": commit(), "card": card, "torch": torch.__version__, "sizes": results}
    print(json.dumps(found, indent=2), file=answer)
    answer.close()


if __name__ == "__main__":
    main()
