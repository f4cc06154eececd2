"""The cost of passes is measured on the device, and bins are packed by it."""

import itertools
from pathlib import Path

import pytest

from tests.unit.training.cuts import make_config, make_plan, make_rollouts
from training import policy_loading
from training.learner import RankLearner
from training.packing import PassCost, _num_depths
from training.plan_types import TrainingSequence
from training.policy_loading import LoadedPolicy, measure_cost
from training.prefix_tree import shared_tokens

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.mark.parametrize("more", [{}, {"lora": {"rank": 4, "target_modules": ["q_proj"]}}])
def test_passes_are_measured_in_units_of_a_token_and_leave_no_gradient(model: Path, more: dict[str, object]) -> None:
    learner = RankLearner(model, make_config(512, **more))
    before = learner.canary()
    loaded = LoadedPolicy(learner.policy, learner.packing, learner.work, learner.cost)
    cost = measure_cost(loaded, 128, 512, learner.device)
    assert cost.pair == learner.cost.pair and 0 < cost.launches < 10 * 512 and 0 <= cost.depth < 10 * 512
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    assert learner.canary() == before, "the weights are as they were"


def test_a_depth_costs_what_each_depth_of_the_measured_tree_adds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is said to last a second for each depth at which its tree forks, and one more."""
    learner = RankLearner(model, make_config(512))

    def seconds(policy: object, chains: list[list[int]], device: object) -> float:
        sequences = [TrainingSequence.of_ids(ids) for ids in chains]
        shared = [shared_tokens(one.ids, other.ids) for one, other in itertools.pairwise(sequences)]
        return 1.0 + _num_depths(shared)

    monkeypatch.setattr(policy_loading, "_pass_seconds", seconds)
    cost = measure_cost(LoadedPolicy(learner.policy, "tree", learner.work, learner.cost), 128, 512, learner.device)
    assert cost.depth == pytest.approx(cost.launches)


def test_a_cpu_launches_nothing(model: Path) -> None:
    assert RankLearner(model, make_config(512)).cost[1:] == (0, 0)


@pytest.mark.parametrize(("launches", "has_shared"), [(1e9, False), (1e-3, True)])
def test_a_learner_packs_by_the_cost_of_its_device(model: Path, launches: float, has_shared: bool) -> None:
    rollouts = make_rollouts(7)
    plan, chains = make_plan(rollouts, "token_mean"), [chain for one in rollouts for chain in one.chains([True, False])]
    learner = RankLearner(model, make_config(4096))
    learner.cost = PassCost(learner.cost.pair, launches, launches / 8)
    members = {member.rollout_id: member for member in plan.members}
    sums = learner.accumulate(chains, members)
    assert (sums.computed_tokens < sums.chain_tokens) == has_shared
