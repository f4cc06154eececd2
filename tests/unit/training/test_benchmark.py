"""The training benchmark uses the default settings of a run."""

from pathlib import Path

import pytest

from ratchet.config import LossConfig, TrainingConfig
from tests.benchmarks._settings import LOSS, TRAINING, settings
from tests.unit.training.cuts import make_plan, make_relatives
from training.learner import RankLearner


@pytest.mark.parametrize(("section", "values"), [(LossConfig(preset="dapo"), LOSS), (TrainingConfig(), TRAINING)])
def test_the_benchmark_trains_with_the_defaults_of_a_run(
    section: LossConfig | TrainingConfig, values: dict[str, object]
) -> None:
    assert {name: getattr(section, name) for name in values} == values


def test_the_learner_reads_no_setting_that_the_benchmark_lacks(model: Path, single_rank: None) -> None:
    family = make_relatives(5)
    chains = [chain for one in family for chain in one.chains([True])]
    assert RankLearner(model, settings(bin_tokens=256)).step(make_plan(family, "token_mean"), chains).num_skipped == 0
