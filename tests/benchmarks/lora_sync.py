"""Bytes and seconds of a weight update of the real vLLM on a CPU: an adapter against whole weights.

`ratchet admin bench lora_sync`. A Qwen3 of 115 million float32 weights, rank 16 on all linear layers, no calls in
flight. Whole weights and adapters take turns on one engine, so that both have the same neighbours. Seconds are those of
`engine/weight_update.py`: paused, digests checked, loaded, labelled, resumed (`pause`), and with the canary's text
scored, which includes the first token (`with_canary`). Writing the files is measured, too. Prints JSON.
"""

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine import policy_files
from engine.client import EngineClient
from engine.process import vllm_process
from engine.weight_update import load_from_files, replace_weights
from ratchet.config import LoraConfig
from store.engines import PublishedPolicy
from tests.benchmarks._commit import commit
from tests.cpu_vllm import cpu_settings, wait_until_healthy

ROUNDS = 5
IDS = list(range(10, 74))
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def publish_both(root: Path) -> dict[str, Any]:
    """Write a base, whole weights and an adapter below `root`; return the seconds of the last two."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.standins.tiny_model import make_tokenizer
    from training import lora

    torch.manual_seed(0)
    base = root / "run" / "0.e0"
    make_tokenizer(base)
    model = Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=4096, **SHAPE))
    model.save_pretrained(base)
    # Other weights than the base's, so that an adapter that follows them must bring its base.
    state = {name: 1.01 * one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    started = time.perf_counter()
    policy_files.publish_policy(state, base, root / "run" / "1.e1")
    whole = time.perf_counter() - started
    settings = LoraConfig()
    lora.add_adapters(model, settings)
    parameters = {f"model.{name}": one for name, one in model.named_parameters()}  # as in TrainablePolicy
    tensors = {name: 0.02 * torch.randn_like(one) for name, one in lora.adapter_tensors(parameters)}
    base_files = policy_files.weight_files(policy_files.describe_files(base))
    started = time.perf_counter()
    policy_files.publish_adapter(tensors, lora.peft_config(settings, base), base, base_files, root / "run" / "2.e1")
    return {"whole": whole, "adapter": time.perf_counter() - started}


async def measure(root: Path, home: Path) -> dict[str, Any]:
    written = publish_both(root)
    rank = LoraConfig().rank
    settings = cpu_settings(root / "run" / "0.e0", home, policies_root=root, max_num_seqs=4, lora_rank=rank)
    versions = {
        name: PublishedPolicy(name, str(directory), policy_files.describe_files(directory), None)
        for name, directory in (("whole", root / "run" / "1.e1"), ("adapter", root / "run" / "2.e1"))
    }
    times: dict[str, list[tuple[float, float]]] = {"whole": [], "adapter": [], "adapter on another base": []}
    async with vllm_process(settings, settings.model_path) as process, EngineClient(settings.address) as client:
        await wait_until_healthy(client, process)
        await client.init_weight_transfer(str(root), settings.adapter)
        await client.score(IDS)
        for _ in range(ROUNDS):
            # After whole weights an adapter brings its base; the second time it is alone.
            for kind, name in (("whole", "whole"), ("adapter on another base", "adapter"), ("adapter", "adapter")):
                started = time.perf_counter()
                await replace_weights(client, name, load_from_files(versions[name], root))
                paused = time.perf_counter() - started
                await client.score(IDS)
                times[kind].append((paused, time.perf_counter() - started))
    num_bytes = {
        name: sum(file["bytes"] for file in policy_files.weight_files(one.files)) for name, one in versions.items()
    }
    seconds = {
        kind: {
            "pause": round(median(pause for pause, _ in found), 3),
            "with_canary": round(median(whole for _, whole in found), 3),
        }
        for kind, found in times.items()
    }
    return {"bytes": num_bytes, "write_seconds": written, "seconds": seconds}


def main() -> None:
    before = os.getloadavg()[0]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to its standard output, which is this process's
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(Path(directory) / "policies", Path(directory)))
    load = {"load_at_start": before, "load_at_end": os.getloadavg()[0]}
    print(json.dumps({"commit": commit(), "rounds": ROUNDS, **load, **found}, indent=2), file=answer)
    answer.close()


if __name__ == "__main__":
    main()
