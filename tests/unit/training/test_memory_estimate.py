"""The bytes that a rank is estimated to send are those of torch's collectives in a run of two ranks."""

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ratchet.config import RunConfig
from tests.unit.training.cuts import make_config, make_plan, make_relatives
from tests.unit.training.test_gradients import MOE, make_architecture
from training.learner import RankLearner
from training.memory_estimate import pass_bytes, publish_bytes
from training.model_facts import ModelFacts
from training.packing import deal_bins

RANKS = 2
TOLERANCE = 0.001


class CollectiveBytes(TorchDispatchMode):
    """Counts what this rank sends in collectives, of gathers and reductions all but its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.sent += _sent(name.partition("::")[2], args, found)
        return found


def _sent(name: str, args: Any, found: Any) -> float:
    if name == "_allgather_base_":
        return float(args[0].nbytes - args[1].nbytes)
    if name == "_reduce_scatter_base_":
        return float(args[1].nbytes - args[0].nbytes)
    if name == "all_gather_into_tensor":
        return float(found.nbytes - args[0].nbytes)
    return sum(2 * one.nbytes * (1 - 1 / RANKS) for one in args[0]) if name == "allreduce_" else 0.0


def count_rank(meeting: Path, number: int, cases: list[tuple[Path, RunConfig]], answer: Path) -> None:
    """Run one rank's process: the bytes that each case's learner sends in a pass and to publish."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=RANKS)
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True])]
    members = {member.rollout_id: member for member in plan.members}
    found = []
    for at, (model, config) in enumerate(cases):
        learner = RankLearner(model, config)
        dealt = deal_bins(chains, RANKS, config.training.bin_tokens, learner.packing, learner.cost).bins
        with CollectiveBytes() as passed:
            learner.accumulate(chains, members)
        with CollectiveBytes() as published:
            learner.publish(answer.parent / f"{at}.e1")
        found.append((passed.sent / len(dealt[0]), published.sent, len(dealt[0])))
    if number == 0:
        answer.write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_sends_what_is_estimated(tmp_path: Path) -> None:
    """Of bins whose tokens all fit into one pass and into several; of whole weights, copies, experts and adapters."""
    experts = make_architecture("Qwen3MoeForCausalLM", tmp_path, **MOE, tie_word_embeddings=False)
    settings = json.loads((experts / "config.json").read_text())
    (experts / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat16"}))
    adapters = {"rank": 4, "target_modules": ["q_proj"]}
    training: list[dict[str, Any]] = [{}, {"shard_ranks": 1}, {"expert_parallel": 2}, {"lora": adapters}]
    cases = [(experts, make_config(4096, dtype="bfloat16", **one)) for one in training]
    loss = cases[0][1].loss.model_copy(update={"reference_kl": 0.1})
    cases.append((experts, cases[0][1].model_copy(update={"loss": loss})))
    cases.append((experts, make_config(64, dtype="bfloat16", packing="padded")))
    answer = tmp_path / "answer"
    forks = multiprocessing.get_context("forkserver")
    ranks = [forks.Process(target=count_rank, args=(tmp_path / "meeting", at, cases, answer)) for at in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    measured = pickle.loads(answer.read_bytes())
    facts = ModelFacts.read(experts)
    for (_, config), (passed, published, _) in zip(cases, measured, strict=True):
        weights = 0 if config.training.lora is None else facts.adapter_weights(config.training.lora)
        frozen = facts.sizes.weights if config.loss.reference_kl else 0
        of_copy = config.training.shard_ranks or RANKS
        expected = pass_bytes(facts.sizes, RANKS, of_copy, frozen, config.training.expert_parallel, weights)
        assert passed == pytest.approx(expected, rel=TOLERANCE)
        assert published == pytest.approx(publish_bytes(facts.sizes, of_copy, weights), rel=TOLERANCE)
    assert [number > 1 for _, _, number in measured] == [False] * 5 + [True]
