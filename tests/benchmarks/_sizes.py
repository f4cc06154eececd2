"""The learner at sizes that people train, on one device: tokens per second, MFU and memory, compared with a plain
Hugging Face loop.

Prefix trees do not help on one long chain, so this measures the training step itself, with random weights in the shapes
of Qwen3. Run by `tests/benchmarks/training.py --device cuda`; `--size toy` runs on a CPU.

A step is forward, backward and the optimiser's update over one chain, three quarters of whose tokens are trained:
bfloat16 with float32 master weights, each layer recomputed in the backward pass. The plain loop has bfloat16 weights,
transformers' own attention and checkpointing, and computes all logits at once. All compute the logprobs of the same
chain before the first step; `Exact` computes those of its beginning in float32.
"""

import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from stack.ports import free_port
from tests.benchmarks._settings import settings
from training.plan_types import Member, TrainingSequence

Array = npt.NDArray[np.float32]
HEADS = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **HEADS,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {**HEADS, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {
        **HEADS,
        "tie_word_embeddings": False,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "toy": {
        **HEADS,
        "vocab_size": 4096,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    | {"num_attention_heads": 8},
}
LENGTHS = {"0.6B": (16_384, 65_536), "4B": (16_384, 65_536), "8B": (16_384,), "toy": (256,)}
EXACT_TOKENS = 4096
"""The number of a chain's trained tokens whose logprobs are compared with float32."""


def make_chain(length: int, vocab_size: int) -> TrainingSequence:
    random = np.random.default_rng(0)
    ids = random.integers(0, vocab_size, length).astype(np.int32)
    mask = np.arange(length) >= length // 4
    behaviour = np.where(mask, -np.log(vocab_size) + 0.1 * random.standard_normal(length), 0).astype(np.float32)
    return TrainingSequence(0, ids, mask, behaviour, np.zeros(length, dtype=np.int64), 1.0)


class Ours:
    def __init__(self, model: Path, chain: TrainingSequence) -> None:
        import torch.distributed as dist

        from training.learner import RankLearner

        dist.init_process_group(init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        self.learner = RankLearner(
            model,
            settings(dtype="bfloat16", activation_checkpointing=True, bin_tokens=len(chain.ids), **self.more()),
        )
        self.chain = chain
        self.members = {0: Member(0, 0, None, 0.0, 1.0, 1, 0, 1 / int(chain.mask.sum()))}
        self.flops = 0.0

    def more(self) -> dict[str, Any]:
        """Return further values of the training section."""
        return {}

    def logprobs(self) -> Array:
        import torch

        from training.packing import pack_bin
        from training.policy_inputs import make_inputs

        learner = self.learner
        bin = pack_bin([self.chain], learner.packing)
        with torch.no_grad():
            found, _ = learner.policy(make_inputs(bin, learner.device), 1.0)
        return found.float().cpu().numpy()  # type: ignore[no-any-return]

    def step(self) -> None:
        self.flops = self.learner.accumulate([self.chain], self.members).flops
        self.learner._update()

    def facts(self, seconds: float) -> dict[str, Any]:
        peak = self.learner.peak_flops
        return {
            "tflop_per_second": round(self.flops / seconds / 1e12, 1),
            "mfu": round(self.flops / seconds / peak, 3) if peak else None,
        }


class Lora(Ours):
    """The learner with the default adapters: rank 16, on all linear layers. Needs pydantic and peft."""

    def more(self) -> dict[str, Any]:
        from ratchet.config import LoraConfig

        return {"lora": LoraConfig()}


class Plain:
    def __init__(self, model: Path, chain: TrainingSequence) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.ids = torch.from_numpy(chain.ids.astype(np.int64))[None].to(device)
        self.mask, self.behaviour = (torch.from_numpy(part[1:]).to(device) for part in (chain.mask, chain.behaviour))

    def _logprobs(self) -> Any:
        logits = self.model(input_ids=self.ids, use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, self.ids[0, 1:, None])[:, 0]

    def logprobs(self) -> Array:
        import torch

        with torch.no_grad():
            return self._logprobs()[self.mask].cpu().numpy()  # type: ignore[no-any-return]

    def step(self) -> None:
        logprobs = self._logprobs()
        ratios = (logprobs - self.behaviour).exp()
        losses = -ratios.clamp(0.8, 1.28).minimum(ratios)
        ((losses * self.mask).sum() / self.mask.sum()).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def facts(self, seconds: float) -> dict[str, Any]:
        return {}


class Exact:
    """transformers' own model in float32: logprobs of the beginning of the chain, and no step."""

    def __init__(self, model: Path, chain: TrainingSequence) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        end = int(chain.mask.argmax()) + EXACT_TOKENS
        self.ids = torch.from_numpy(chain.ids[:end].astype(np.int64))[None].to(device)
        self.mask = torch.from_numpy(chain.mask[1:end]).to(device)

    def logprobs(self) -> Array:
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=self.ids, use_cache=False).logits[0, :-1]
            found = logits.log_softmax(-1).gather(-1, self.ids[0, 1:, None])[:, 0]
        return found[self.mask].cpu().numpy()  # type: ignore[no-any-return]


Way = type[Ours] | type[Plain] | type[Exact]


def work(pipe: Connection, way: Way, model: Path, length: int, vocab_size: int, rounds: int) -> None:
    import torch

    found: dict[str, Any]
    logprobs: Array | None = None
    try:
        started = time.perf_counter()
        engine = way(model, make_chain(length, vocab_size))
        logprobs = engine.logprobs()
        found = {"load_seconds": round(time.perf_counter() - started, 1)}
        if not isinstance(engine, Exact):
            engine.step()
            seconds = median(_timed(engine.step) for _ in range(rounds))
            found |= {"seconds": round(seconds, 3), "tokens_per_second": round(length / seconds)}
            found |= engine.facts(seconds)
    except torch.OutOfMemoryError:
        found = {"out_of_memory": True}
    if torch.cuda.is_available():
        found |= {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "card": torch.cuda.get_device_name()}
    pipe.send((found, logprobs))


def _timed(step: Callable[[], None]) -> float:
    import torch

    started = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


@contextmanager
def random_model(size: str) -> Iterator[Path]:
    """Write a model of this size with random bfloat16 weights; yield its directory, which is deleted afterwards."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        shape = Qwen3Config(max_position_embeddings=131_072, **SIZES[size])
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model = Qwen3ForCausalLM._from_config(shape, dtype=torch.bfloat16)
        model.save_pretrained(directory)
        del model
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield Path(directory)


def measure_way(way: Way, model: Path, length: int, rounds: int) -> tuple[dict[str, Any], Array | None]:
    """Return what one way took, in a new process, and the logprobs of the trained tokens, None without memory."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    arguments = (there, way, model, length, json.loads((model / "config.json").read_text())["vocab_size"], rounds)
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    there.close()  # so that the death of the process is an end of file
    found: tuple[dict[str, Any], Array | None] = here.recv()
    process.join()
    return found


def measure(size: str, rounds: int) -> list[dict[str, Any]]:
    results = []
    with random_model(size) as model:
        for length in LENGTHS[size]:
            ways, logprobs = {}, []
            for way in (Ours, Plain):
                ways[way.__name__.lower()], found = measure_way(way, model, length, rounds)
                logprobs.append(found)
            speeds = [found.get("tokens_per_second") for found in ways.values()]
            ratio = round(speeds[0] / speeds[1], 2) if all(speeds) else None
            results.append({"size": size, "tokens": length, "ours_over_plain": ratio, **difference(*logprobs), **ways})
    return results


def difference(ours: Array | None, plain: Array | None) -> dict[str, float]:
    """Differences of the trained tokens' logprobs with the same bfloat16 weights: only rounding is expected.

    If one has fewer, it has those of the beginning.
    """
    if ours is None or plain is None:
        return {}
    shorter = min(len(ours), len(plain))
    gaps = np.abs(ours[:shorter] - plain[:shorter])
    return {"mean_abs_logprob_difference": float(gaps.mean()), "max_abs_logprob_difference": float(gaps.max())}
