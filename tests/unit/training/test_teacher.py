"""On-policy distillation: the gradient of the divergence, a policy that approaches its teacher, and refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ratchet.config import RunConfig
from tests.unit.training.cuts import gradient, make_plan, make_relatives
from tests.unit.training.test_reference import config, other, scores  # noqa: F401  # `other` is a fixture
from training.learner import RankLearner
from training.loss import MAX_LOG_RATIO
from training.reference import teacher_gaps, teacher_losses

pytestmark = [pytest.mark.usefixtures("single_rank"), pytest.mark.filterwarnings("ignore")]


def distilled(teacher: Path, packing: str = "auto", **loss: object) -> RunConfig:
    return config(packing, distillation=0.7, teacher_model=str(teacher), **loss)


def test_the_mean_gradient_is_that_of_the_divergence() -> None:
    """Over a distribution of four tokens, weighted by how often another policy samples each of them."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    sampler = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    ratios = (logprobs - sampler.log()).exp()
    estimate = (sampler * teacher_losses(logprobs, teacher_gaps(logprobs, teacher), ratios)).sum()
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    assert found.tolist() == pytest.approx(expected.tolist())


def test_a_token_that_the_teacher_never_writes_has_a_bounded_gradient() -> None:
    gaps = teacher_gaps(torch.tensor([-2.0, -1.0], requires_grad=True), torch.tensor([-500.0, -1.0]))
    assert gaps.tolist() == [MAX_LOG_RATIO, 0.0] and not gaps.requires_grad


def test_the_loss_is_that_of_the_teachers_own_logprobs(model: Path, other: Path) -> None:  # noqa: F811
    """Against Hugging Face's own forward passes of both models, token by token."""
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]
    members = {member.rollout_id: member for member in plan.members}
    learner = RankLearner(model, distilled(other, reward_factor=0.0))
    sums = learner.accumulate(chains, members)
    expected_loss = expected_kl = 0.0
    for chain in chains:
        trained = torch.from_numpy(chain.mask)
        ours, theirs = scores(model, chain)[trained], scores(other, chain)[trained]
        ratios = (ours - torch.from_numpy(chain.behaviour)[trained]).exp().clamp(max=5.0)
        expected_kl += float((ours - theirs).sum())
        expected_loss += 0.7 * members[chain.rollout_id].weight * float((ratios * (ours - theirs) * ours).sum())
    assert sums.loss == pytest.approx(expected_loss, rel=1e-4)
    assert sums.teacher_kl == pytest.approx(expected_kl, rel=1e-4)
    assert learner.teacher is not None and all(one.grad is None for one in learner.teacher.parameters())


@pytest.mark.parametrize("packing", ["tree", "packed"])
def test_the_packing_changes_nothing(model: Path, other: Path, packing: str) -> None:  # noqa: F811
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]
    found = gradient(model, distilled(other, packing), plan, chains)
    expected = gradient(model, distilled(other, "padded"), plan, chains)
    assert np.abs(found - expected).max() <= 1e-6 * max(1.0, float(np.abs(expected).max()))


def test_steps_bring_the_policy_closer_to_its_teacher(model: Path, other: Path) -> None:  # noqa: F811
    """Rewards are left out; the same samples are used again, so the ratios correct for the moving policy."""
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([False])]
    settings = distilled(other, reward_factor=0.0)
    plan = replace(plan, knobs=plan.knobs | {"learning_rate": 3e-3})
    fast = settings.training.model_copy(update={"warmup_steps": 0})
    learner = RankLearner(model, settings.model_copy(update={"training": fast}))
    gaps = [learner.step(plan, chains).metrics["teacher_kl"] for _ in range(8)]
    assert gaps[-1] < gaps[0] - 0.05, gaps


def test_what_cannot_be_distilled_is_refused() -> None:
    with pytest.raises(ValidationError, match="distillation: needs teacher_model"):
        config(distillation=1.0)
    with pytest.raises(ValidationError, match="sft trains solved rollouts only"):
        config(distillation=1.0, teacher_model="t", preset="sft")
