"""Bytes and seconds of versions at an address that are stored as deltas, against whole ones.

`ratchet admin bench weight_deltas`. Random Qwen3 models: the tiny policy's shape in float32 with the quickstart's
optimiser, and Qwen3-0.6B's shape in bfloat16 with float32 master weights and the default betas, at two learning rates.
Each version follows a real AdamW step on random tokens, and is written as the learner does it. AdamW's first steps are
its largest. Whole: uploaded, then fetched and digested by a node that has nothing. Delta: encoded and uploaded by the
learner's code, then fetched, applied and digested by a node that has the version before. The address is a directory
(`file://`), so the seconds are the cost without a network. The 0.6B takes 9 GiB of memory; `-- tiny` runs the cases
with that name only. Prints JSON.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine import policy_files, weight_deltas, weight_storage
from engine.policy_cache import PolicyCache
from engine.weight_deltas import LocalVersion
from examples.tiny_policy.settings import TinyPolicySettings
from tests.benchmarks._commit import commit

STEPS = 2
NUM_TOKENS = 32
_TINY = TinyPolicySettings()
TINY_SHAPE = {
    "vocab_size": _TINY.max_vocabulary,
    "hidden_size": _TINY.hidden_size,
    "intermediate_size": _TINY.feed_forward_size,
    "num_hidden_layers": _TINY.num_layers,
    "num_attention_heads": _TINY.num_heads,
    "num_key_value_heads": _TINY.num_heads,
    "head_dim": _TINY.head_dim,
    "initializer_range": _TINY.initializer_range,
    "tie_word_embeddings": True,
}
SMALL_SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Of Qwen3-0.6B's config."""


@dataclass(frozen=True)
class Case:
    """A model and its optimiser."""

    shape: dict[str, Any]
    dtype: str
    learning_rate: float
    betas: tuple[float, float]


CASES = {
    "tiny policy, float32, 2.5e-4": Case(TINY_SHAPE, "float32", 2.5e-4, (0.0, 0.95)),
    "Qwen3-0.6B, bfloat16, 1e-6": Case(SMALL_SHAPE, "bfloat16", 1e-6, (0.9, 0.95)),
    "Qwen3-0.6B, bfloat16, 1e-5": Case(SMALL_SHAPE, "bfloat16", 1e-5, (0.9, 0.95)),
}


class Trainer:
    """A model whose versions are written below `home`/learner."""

    def __init__(self, home: Path, case: Case) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        self.case = case
        self.home = home
        self.dtype = getattr(torch, case.dtype)
        (home / "base").mkdir()
        self.model = Qwen3ForCausalLM(Qwen3Config(**case.shape))
        for parameter in self.model.parameters():
            step = torch.optim.AdamW([parameter], lr=case.learning_rate, betas=case.betas, weight_decay=0.0)
            parameter.register_post_accumulate_grad_hook(partial(self._update, step))  # frees each gradient at once

    def _update(self, optimiser: Any, _: Any) -> None:
        optimiser.step()
        optimiser.zero_grad()

    def step(self) -> None:
        import torch

        ids = torch.randint(self.case.shape["vocab_size"], (1, NUM_TOKENS))
        self.model(input_ids=ids, labels=ids).loss.backward()

    def publish(self, step: int) -> LocalVersion:
        named = self.model.state_dict().items()
        state = {name: tensor.to(self.dtype) for name, tensor in named if name != "lm_head.weight"}
        version = f"run/{step}.e1"
        directory = self.home / "learner" / version
        return LocalVersion(version, directory, policy_files.publish_policy(state, self.home / "base", directory))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def changed_share(before: Path, after: Path, num_bytes: int) -> float:
    """Return the share of numbers of so many bytes that differ."""
    old, new = (np.memmap(one / "model.safetensors", f"<u{num_bytes}", "r", 8) for one in (before, after))
    return float((old != new).mean())


def whole_round(home: Path, version: LocalVersion) -> dict[str, float]:
    uri = weight_storage.version_address(f"file://{home}/whole", version.version)
    upload = seconds_of(lambda: weight_storage.upload_version(version.directory, uri, version.files))
    with PolicyCache(home / "other") as other:
        fetch = seconds_of(lambda: other.fetch(uri, version.files))
    shutil.rmtree(home / "other")
    weight_storage.delete_version(uri)
    return {"whole: bytes": weight_deltas.stored_bytes(version.files), "whole: upload": upload, "whole: fetch": fetch}


def delta_round(home: Path, node: PolicyCache, version: LocalVersion, encode_seconds: float) -> dict[str, float]:
    """Store and fetch a version whose deltas are in `home`/deltas."""
    uri = weight_storage.version_address(f"file://{home}/stored", version.version)
    return {
        "delta: bytes": weight_deltas.stored_bytes(version.files),
        "delta: encode": encode_seconds,
        "delta: upload": seconds_of(lambda: weight_deltas.upload(version, home / "deltas", uri, set())),
        "delta: fetch": seconds_of(lambda: node.fetch(uri, version.files)),
    }


def measure(home: Path, case: Case) -> dict[str, Any]:
    """Return the figures of each step."""
    trainer = Trainer(home, case)
    before, rounds = trainer.publish(0), []
    with PolicyCache(home / "node") as node:
        uri = weight_storage.version_address(f"file://{home}/stored", before.version)
        weight_storage.upload_version(before.directory, uri, before.files)
        node.fetch(uri, before.files)
        for step in range(1, STEPS + 1):
            trainer.step()
            after = trainer.publish(step)
            shares = {"changed": changed_share(before.directory, after.directory, trainer.dtype.itemsize)}
            started = time.perf_counter()
            files = weight_deltas.with_deltas(after, before, home / "deltas", STEPS + 1)
            encode_seconds = time.perf_counter() - started
            stored = LocalVersion(after.version, after.directory, files)
            figures = shares | whole_round(home, after) | delta_round(home, node, stored, encode_seconds)
            rounds.append({key: float(f"{figure:.4g}") for key, figure in figures.items()})
            print(rounds[-1], file=sys.stderr, flush=True)
            shutil.rmtree(before.directory)
            before = stored
    return {key: [one[key] for one in rounds] for key in rounds[0]}


def main() -> None:
    cases = {name: case for name, case in CASES.items() if all(word in name for word in sys.argv[1:])}
    load, found = os.getloadavg()[0], {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as directory:
            found[name] = measure(Path(directory), case)
    loads = {"load_at_start": load, "load_at_end": os.getloadavg()[0]}
    print(json.dumps({"commit": commit(), **loads, **found}, indent=2))


if __name__ == "__main__":
    main()
