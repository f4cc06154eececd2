"""KL to a reference: TRL's loss and gradients, what it costs nothing for, and what cannot be a reference."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ratchet.config import RunConfig
from tests.standins.tiny_model import make_tokenizer
from tests.unit.training.cuts import gradient, make_plan, make_relatives
from tests.unit.training.test_megatron_checkpoint import as_megatron, read, save
from tests.unit.training.test_trl import make_batch
from training.learner import RankLearner
from training.loss import MAX_LOG_RATIO
from training.plan_types import TrainingSequence
from training.reference import kl_estimates

pytestmark = [pytest.mark.usefixtures("single_rank"), pytest.mark.filterwarnings("ignore")]


def config(packing: str = "auto", **loss: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "datasets": [{"path": "unused.jsonl"}],
            "sampling": {"max_response_tokens": 32, "max_context_tokens": 64},
            "loss": {"preset": "grpo", **loss},
            "training": {"bin_tokens": 512, "packing": packing},
        }
    )


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights and the same tokenizer."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, directory)
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights.save_pretrained(directory)
    return directory


def scores(path: Path, chain: TrainingSequence) -> torch.Tensor:
    """Return the model's logprob of each token of the chain by Hugging Face's own forward pass; 0 for the first."""
    from transformers import AutoModelForCausalLM

    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.as_tensor(chain.ids.astype(np.int64))
    with torch.no_grad():
        logprobs = weights(ids[None]).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(-1, ids[1:, None])[:, 0]])


def test_loss_and_gradients_are_those_of_trl(model: Path, other: Path, tmp_path: Path) -> None:
    from tests.benchmarks._trl import TrlStep

    settings = config(reference_kl=0.3, reference_model=str(other))
    plan, chains = make_batch(1, "rollout_mean")
    members = {member.rollout_id: member for member in plan.members}
    theirs = TrlStep(model, tmp_path, 8, 8, loss_type="grpo", beta=0.3)
    their_loss = theirs.gradients(theirs.batch(chains, members, [scores(other, one) for one in chains]))
    learner = RankLearner(model, settings)
    sums = learner.accumulate(chains, members)
    ours = np.concatenate([parameter.grad.full_tensor().flatten().numpy() for parameter in learner.policy.parameters()])
    assert sums.loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert sums.reference_kl / sums.reference_tokens > 0.01
    assert np.abs(ours - theirs.gradient().numpy()).max() <= 3e-6 * max(1.0, float(np.abs(ours).max()))
    assert all(parameter.grad is None for parameter in learner.reference.parameters())


@pytest.mark.parametrize("packing", ["tree", "packed"])
def test_the_packing_changes_nothing(model: Path, other: Path, packing: str) -> None:
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([True, False])]
    knobs = {"reference_kl": 0.3, "reference_model": str(other)}
    found = gradient(model, config(packing, **knobs), plan, chains)
    expected = gradient(model, config("padded", **knobs), plan, chains)
    assert np.abs(found - expected).max() <= 1e-6 * max(1.0, float(np.abs(expected).max()))


def test_the_first_weights_are_the_reference_unless_another_is_named(model: Path) -> None:
    """A policy that has not moved has KL 0 to where it began, and no gradient from it."""
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([False])]
    learner = RankLearner(model, config(reference_kl=0.3))
    sums = learner.accumulate(chains, {member.rollout_id: member for member in plan.members})
    assert (sums.reference_tokens, sums.reference_kl) == (sums.num_tokens, pytest.approx(0, abs=1e-9))
    assert (
        np.abs(gradient(model, config(reference_kl=0.3), plan, chains) - gradient(model, config(), plan, chains)).max()
        <= 1e-7
    )
    assert RankLearner(model, config()).reference is None


def test_a_checkpoint_of_megatron_is_the_reference(model: Path, other: Path, tmp_path: Path) -> None:
    """Its KL is that of the same weights in Hugging Face's format."""
    family = make_relatives(3)
    plan, chains = make_plan(family, "token_mean"), [chain for one in family for chain in one.chains([False])]
    members = {member.rollout_id: member for member in plan.members}
    stored = save(as_megatron(read(other), stacked=True), tmp_path / "torch_dist")
    found, expected = (
        RankLearner(model, config(reference_kl=0.3, reference_model=str(one))).accumulate(chains, members).reference_kl
        for one in (stored, other)
    )
    assert found == pytest.approx(expected, rel=1e-6) and expected > 0.01


def test_another_tokenizer_is_refused(model: Path, other: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(other, foreign)
    make_tokenizer(foreign, vocab_size=300)
    with pytest.raises(ValueError, match="has another tokenizer than the policy"):
        RankLearner(model, config(reference_kl=0.1, reference_model=str(foreign)))


def test_the_mean_gradient_is_that_of_the_divergence() -> None:
    """Over a distribution of four tokens, weighted by how often another policy samples each of them."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    sampler = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    estimate = (sampler * kl_estimates(logprobs, reference, (logprobs - sampler.log()).exp())).sum()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact, logits)
    assert float(estimate) == pytest.approx(float(exact))
    assert found.tolist() == pytest.approx(expected.tolist())


def test_the_estimate_is_bounded() -> None:
    logprobs = torch.tensor([-200.0, -2.0, float("nan")], requires_grad=True)
    values = kl_estimates(logprobs, torch.tensor([-1.0, -2.0, -1.0]), torch.ones(3))
    torch.autograd.backward(values[:2].sum())
    assert logprobs.grad is not None
    assert logprobs.grad[:2].tolist() == [0, 0]
    assert float(values[0]) == pytest.approx(np.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO, rel=1e-5)
    assert (float(values[1]), bool(values[2].isnan())) == (0.0, True)
