"""Every loss preset against its closed form and against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ratchet.config import LOSS_PRESET_VALUES, LossConfig, RunConfig
from ratchet.errors import ConfigError
from training.loss import LOSS_PRESETS, TokenBatch, clip_masks, find_loss, token_loss

PER_TOKEN = ["grpo", "dr_grpo", "dapo", "brief", "cispo", "tis", "icepop", "sft"]


def knobs(preset: str) -> LossConfig:
    return LossConfig(preset=preset, clip_low=0.2, clip_high=0.28, mask_low=0.5, mask_high=5.0, ratio_cap=5.0)


def tokens(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, turns: list[int] | None = None) -> TokenBatch:
    return TokenBatch(logprobs, behaviour, advantages, torch.tensor(turns or [0] * len(logprobs)))


def closed_form(preset: str, logprob: float, ratio: float, advantage: float) -> tuple[float, float]:
    """Return (loss, d loss / d logprob) of one token."""
    if preset in ("grpo", "dr_grpo", "dapo", "brief"):
        clipped = min(max(ratio, 0.8), 1.28)
        flows = ratio * advantage <= clipped * advantage
        return -min(ratio * advantage, clipped * advantage), -ratio * advantage if flows else 0.0
    if preset == "icepop":
        kept = 0.5 <= ratio <= 5.0
        return (-ratio * advantage, -ratio * advantage) if kept else (0.0, 0.0)
    if preset == "sft":
        return -logprob, -1.0
    capped = min(ratio, 5.0)
    return -capped * advantage * logprob, -capped * advantage


def test_every_preset_is_tested_and_configured() -> None:
    assert set(LOSS_PRESETS) == {*PER_TOKEN, "gspo", "seq_mis"} == set(LOSS_PRESET_VALUES)


@pytest.mark.parametrize("preset", PER_TOKEN)
@pytest.mark.parametrize("ratio", [0.1, 0.49, 0.51, 0.79, 1.0, 1.27, 1.29, 4.9, 5.1, 40.0])
@pytest.mark.parametrize("advantage", [-0.75, 0.25])
def test_closed_forms(preset: str, ratio: float, advantage: float) -> None:
    logprob = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-2.0 - math.log(ratio)], dtype=torch.float64)
    loss = token_loss(tokens(logprob, behaviour, torch.tensor([advantage], dtype=torch.float64)), knobs(preset))
    torch.autograd.backward(loss.sum())
    assert logprob.grad is not None
    assert (loss.item(), logprob.grad.item()) == pytest.approx(closed_form(preset, -2.0, ratio, advantage), rel=1e-9)


@pytest.mark.parametrize(
    ("spread", "advantage", "clipped"), [(0.0, 0.5, False), (0.6, 0.5, True), (0.6, -0.5, False), (-0.6, -0.5, True)]
)
def test_gspo_is_the_clip_of_the_turns_geometric_mean(spread: float, advantage: float, clipped: bool) -> None:
    """Two turns are independent. With one turn, the gradient is that of the paper's sequence loss."""
    log_ratios = torch.tensor([0.1 + spread, -0.1 + spread, 0.05, -0.05], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    given = tokens(
        logprobs, logprobs.detach() - log_ratios, torch.full((4,), advantage, dtype=torch.float64), [0, 0, 1, 1]
    )
    loss = token_loss(given, knobs("gspo"))
    torch.autograd.backward(loss.sum())
    ratio = math.exp(spread)
    bounded = min(max(ratio, 0.8), 1.28)
    assert loss.tolist() == pytest.approx([-min(ratio * advantage, bounded * advantage)] * 2 + [-advantage] * 2)
    assert logprobs.grad is not None
    slope = 0.0 if clipped else -ratio * advantage
    assert logprobs.grad.tolist() == pytest.approx([slope] * 2 + [-advantage] * 2)
    if not clipped:
        sequence = logprobs.detach()[:2].requires_grad_()
        whole = -((sequence - given.behaviour[:2]).mean().exp() * advantage)
        torch.autograd.backward(whole)
        assert sequence.grad is not None
        assert logprobs.grad[:2].tolist() == pytest.approx((2 * sequence.grad).tolist()), (
            "Σ over tokens = tokens × the sequence's"
        )


@pytest.mark.parametrize(("log_ratio", "kept"), [(0.5, True), (-3.0, True), (1.0, False), (50.0, False)])
def test_seq_mis_is_the_product_of_the_turn_or_nothing(log_ratio: float, kept: bool) -> None:
    log_ratios = torch.tensor([log_ratio, log_ratio, 0.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    given = tokens(logprobs, logprobs.detach() - log_ratios, torch.full((3,), 0.5, dtype=torch.float64), [7, 7, 3])
    loss = token_loss(given, knobs("seq_mis"))
    torch.autograd.backward(loss.sum())
    assert logprobs.grad is not None
    product = math.exp(2 * log_ratio) if kept else 0.0
    assert loss.tolist() == pytest.approx([product * 0.5, product * 1.0, 1.5])
    assert logprobs.grad.tolist() == pytest.approx([-product * 0.5, -product * 0.5, -0.5])
    assert clip_masks(given, knobs("seq_mis"))[1].tolist() == [not kept, not kept, False]


@given(
    st.sampled_from(["grpo", "icepop", "sft"]),
    st.lists(st.tuples(st.floats(-6, -0.1), st.floats(-2.5, 2.5), st.floats(-2, 2)), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_gradients_are_finite_differences(preset: str, drawn: list[tuple[float, float, float]]) -> None:
    """Away from the kinks, at which a difference is not defined. Losses with a stopped gradient are left out."""
    kinks = [math.log(bound) for bound in (0.8, 1.28, 0.5, 5.0)]
    drawn = [token for token in drawn if min(abs(token[1] - kink) for kink in kinks) > 1e-3]
    if not drawn:
        return
    logprobs, log_ratios, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True)
    )
    behaviour = logprobs - log_ratios

    def loss(values: Tensor) -> Tensor:
        return token_loss(tokens(values, behaviour, advantages), knobs(preset))

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("preset", [preset for preset in LOSS_PRESETS if preset != "sft"])
def test_on_policy_all_presets_are_the_policy_gradient(preset: str) -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.25])
    torch.autograd.backward(
        token_loss(tokens(logprobs, logprobs.detach().clone(), advantages, [0, 1]), knobs(preset)).sum()
    )
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist())


def squared(given: TokenBatch, loss: LossConfig) -> Tensor:
    return given.logprobs**2 * loss.ratio_cap


def scalar(given: TokenBatch, loss: LossConfig) -> Tensor:
    return given.logprobs.sum()


def test_a_custom_loss() -> None:
    given = tokens(torch.tensor([-1.0, -3.0]), torch.zeros(2), torch.zeros(2))
    assert token_loss(given, knobs(f"{__name__}:squared")).tolist() == [5.0, 45.0]
    with pytest.raises(ValueError, match=r"returned shape \(\), expected \(2,\)"):
        token_loss(given, knobs(f"{__name__}:scalar"))


@pytest.mark.parametrize("name", ["ppo", "no_such:f", "math:no"])
def test_an_unknown_loss_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' cannot be imported"):
        find_loss(name)


def test_a_preset_sets_its_own_values_and_keeps_the_users() -> None:
    base = {"datasets": [{"path": "unused"}], "sampling": {"max_response_tokens": 8, "max_context_tokens": 64}}
    dapo = RunConfig.model_validate(
        {**base, "loss": {"preset": "dapo", "clip_high": 0.5}, "training": {"advantage": "mean"}}
    )
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.loss.reducer, dapo.training.advantage) == (
        0.2,
        0.5,
        "token_mean",
        "mean",
    )
    dr_grpo = RunConfig.model_validate({**base, "loss": {"preset": "dr_grpo"}})
    assert (dr_grpo.loss.clip_high, dr_grpo.loss.reducer, dr_grpo.training.advantage) == (0.2, "constant", "mean")
    assert RunConfig.model_validate({**base, "loss": {"preset": "grpo"}}).training.advantage == "std"
    default = RunConfig.model_validate(base)
    assert (default.loss.preset, default.loss.reducer, default.training.advantage) == ("icepop", "token_mean", "mean")
    assert RunConfig.model_validate(dapo.model_dump()) == dapo, "a resolved config has every value"
    for key in ("loss.preset", "training.advantage"):
        section, name = key.split(".")
        with pytest.raises(ValueError, match=rf"{key}: 'ppo' is unknown"):
            RunConfig.model_validate({**base, section: {name: "ppo"}})


@pytest.mark.parametrize("preset", [*PER_TOKEN, "gspo", "seq_mis"])
@pytest.mark.parametrize("advantage", [-1.0, 0.5])
@pytest.mark.parametrize("log_ratio", [89.0, -89.0, 3000.0, -3000.0, 21.0])
def test_a_far_token_leaves_the_loss_and_its_neighbours_finite(preset: str, advantage: float, log_ratio: float) -> None:
    """exp(88.8) is infinite in float32; a mask behind it would make NaN of it."""
    logprobs = torch.tensor([-3.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-3.0 - log_ratio, -2.0])
    given = tokens(logprobs, behaviour, torch.full((2,), advantage), [0, 1])
    values = token_loss(given, knobs(preset))
    torch.autograd.backward(values.sum())
    assert logprobs.grad is not None
    assert values.isfinite().all() and logprobs.grad.isfinite().all()
    low, high = clip_masks(given, knobs(preset))
    if preset not in ("cispo", "tis") and bool((low | high)[0]):
        assert logprobs.grad[0] == 0, "what is masked has no gradient"
    alone = torch.tensor([-2.0], requires_grad=True)
    torch.autograd.backward(token_loss(tokens(alone, behaviour[1:], torch.full((1,), advantage)), knobs(preset)).sum())
    assert alone.grad is not None and logprobs.grad[1] == alone.grad[0]


@pytest.mark.parametrize("preset", sorted({*LOSS_PRESETS} - {"sft"}))
def test_a_damaged_logprob_is_not_hidden_by_a_mask(preset: str) -> None:
    """Otherwise the token would be left out without a word; the learner leaves out and counts the update."""
    logprobs = torch.tensor([-3.0, -2.0], requires_grad=True)
    given = tokens(logprobs, torch.tensor([torch.nan, -2.0]), torch.full((2,), 0.5), [0, 1])
    torch.autograd.backward(token_loss(given, knobs(preset)).sum())
    assert logprobs.grad is not None and logprobs.grad[0].isnan()
