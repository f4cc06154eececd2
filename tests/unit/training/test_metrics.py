"""Every metric of a step has one definition, and every alarm is raised by its condition only."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from store.training_groups import ConsumedGroup
from tests.unit.training.test_loss import knobs, tokens
from training.metrics import (
    NUM_SUMS,
    StepSums,
    adamw_update_norm,
    alarms,
    group_metrics,
    peak_metrics,
    sequence_metrics,
    speed_metrics,
    token_metrics,
)
from training.plan_types import TrainingSequence
from training.policy_model import ForwardWork


def test_metrics_are_means_over_tokens_for_any_parts() -> None:
    logprobs, behaviour, advantages = torch.randn(10) - 3, torch.randn(10) - 3, torch.randn(10)
    whole, parts = StepSums(), StepSums()
    whole.add(tokens(logprobs, behaviour, advantages), -logprobs, torch.tensor(2.0), knobs("icepop"))
    for start, end in ((0, 3), (3, 10)):
        part = tokens(logprobs[start:end], behaviour[start:end], advantages[start:end])
        parts.add(part, -logprobs[start:end], torch.tensor(1.0), knobs("icepop"))
    metrics = token_metrics(whole.as_list())
    assert token_metrics(parts.as_list()) == pytest.approx(metrics)
    ratio = (logprobs - behaviour).exp()
    assert metrics["mismatch_kl"] == pytest.approx(float((ratio - 1 - ratio.log()).mean()), rel=1e-5)
    assert metrics["masked_fraction"] == pytest.approx(float(((ratio < 0.5) | (ratio > 5)).float().mean()))
    assert metrics["ratio_ess"] == pytest.approx(float(ratio.sum() ** 2 / (10 * ratio.square().sum())), rel=1e-5)
    assert token_metrics([0.0] * NUM_SUMS)["loss"] == 0


def test_staleness_counts_from_the_weights_that_are_trained() -> None:
    """Step 7 trains weights 6. A token of version 8, which a crash took back, has staleness 0."""
    mask = np.array([False, True, True, True])
    arrays = (np.arange(4, dtype=np.int32), mask, np.zeros(4, dtype=np.float32), np.zeros(4, dtype=np.int64))
    one = TrainingSequence(1, *arrays, 1.0, np.array([-1, 6, 4, 8], dtype=np.int32))
    found = sequence_metrics(7, [one, one])
    assert (found["staleness_mean"], found["staleness_max"], found["chains_per_rollout"]) == (
        pytest.approx(2 / 3),
        2.0,
        2.0,
    )
    assert found["versions_per_rollout"] == 3
    assert sequence_metrics(7, [replace(one, policy_steps=None)]) == {"chains_per_rollout": 1.0}, "their age is unknown"


def test_groups_are_counted_by_how_many_were_solved() -> None:
    groups = [
        ConsumedGroup("trained", [0.0, 0.0, 1.0, 1.0], 3),
        ConsumedGroup("trained", [0.0, 0.5, 0.5, 0.0], 0),
        ConsumedGroup("no_signal", [0.0] * 4, 1),
        ConsumedGroup("no_signal", [1.0] * 4, 0),
    ]
    found = group_metrics(groups)
    assert (found["groups_trained"], found["groups_no_signal"], found["groups_with_signal_fraction"]) == (2, 2, 0.5)
    assert [found[f"groups_solved_{name}_fraction"] for name in ("none", "some", "all")] == [0.25, 0.5, 0.25]
    assert found["truncated_fraction"] == 0.25


def test_engine_noise_is_over_tokens_of_the_same_weights() -> None:
    sums = StepSums()
    logprobs, behaviour = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.1, -2.3, -5.0])
    sums.add(
        tokens(logprobs, behaviour, torch.ones(3)),
        -logprobs,
        torch.tensor(1.0),
        knobs("icepop"),
        torch.tensor([True, True, False]),
    )
    found = token_metrics(sums.as_list()) | peak_metrics([sums.peak_mismatch, sums.peak_noise, 1.5])
    assert found["engine_noise_abs"] == pytest.approx(0.2) and found["engine_noise_max"] == pytest.approx(0.3)
    assert found["mismatch_max"] == pytest.approx(2.0) and found["mismatch_abs"] == pytest.approx(0.8)
    sums.add(
        tokens(logprobs, behaviour, torch.ones(3)),
        -logprobs,
        torch.tensor(1.0),
        knobs("icepop"),
        torch.tensor([False] * 3),
    )
    assert "engine_noise_abs" not in token_metrics([0.0] * NUM_SUMS)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_update_norm_is_the_norm_of_the_change_of_the_weights(decay: float) -> None:
    """The norm from the moments equals that of the weights kept from before; one parameter never had a gradient."""
    torch.manual_seed(0)
    weights = [
        torch.nn.Parameter(torch.randn(7, 3)),
        torch.nn.Parameter(torch.randn(5)),
        torch.nn.Parameter(torch.randn(2)),
    ]
    optimiser = torch.optim.AdamW(weights, lr=0.05, betas=(0.9, 0.95), weight_decay=decay)
    for _ in range(4):
        before = [one.detach().clone() for one in weights]
        for one in weights[:2]:
            one.grad = torch.randn_like(one)
        optimiser.step()
        moved = sum(
            float((one.detach() - old).double().square().sum()) for one, old in zip(weights, before, strict=True)
        )
        assert float(adamw_update_norm(optimiser)) == pytest.approx(moved, rel=1e-5)


def test_flops_count_the_layers_that_a_token_passes() -> None:
    """A toy model counted by hand: two layers of 10x10, a vocabulary of 100 tied to its head, four heads of five."""
    work = ForwardWork(body=200, head=1000, per_pair=12 * 2 * 4 * 5)
    assert work.flops(num_tokens=30, num_predictions=8, num_pairs=500) == 6 * (200 * 30 + 1000 * 8) + 480 * 500
    found = speed_metrics({"chain_tokens": 60.0, "computed_tokens": 30.0, "tflop": 4.0}, 2.0, 2, 2e12)
    assert found == {"chain_tokens_per_second": 30, "computed_tokens_per_second": 15, "tflop_per_second": 2, "mfu": 0.5}
    assert "mfu" not in speed_metrics({"chain_tokens": 60.0, "computed_tokens": 30.0, "tflop": 4.0}, 2.0, 2, None)


@pytest.mark.parametrize(
    ("alarm", "name", "value"),
    [
        ("entropy_explosion", "entropy", 9.0),
        ("off_policy", "ratio_ess", 0.1),
        ("engine_mismatch", "engine_noise_abs", 0.5),
        ("drifting", "mismatch_kl", 0.5),
        ("router_replay", "router_replay_fraction", 0.5),
        ("masked", "masked_fraction", 0.5),
        ("no_contrast", "groups_with_signal_fraction", 0.1),
        ("truncated", "truncated_fraction", 0.9),
    ],
)
def test_alarms_are_raised_by_their_condition_only(alarm: str, name: str, value: float) -> None:
    healthy = {
        "entropy": 0.5,
        "ratio_ess": 0.9,
        "mismatch_kl": 0.01,
        "step_seconds": 2.0,
        "wait_for_batch_seconds": 3.0,
    }
    assert alarms(healthy) == alarms({}) == {}
    assert set(alarms({**healthy, name: value})) == {alarm}


def test_low_entropy_is_a_collapse_only_if_most_groups_have_no_signal() -> None:
    """The quickstart's entropy is below 0.02 while its reward rises: most tokens of a tool call are fixed."""
    assert alarms({"entropy": 0.001, "groups_with_signal_fraction": 0.6}) == {}
    assert set(alarms({"entropy": 0.001, "groups_with_signal_fraction": 0.4})) == {"entropy_collapse"}
