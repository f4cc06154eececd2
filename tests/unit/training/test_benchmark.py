"""The training benchmark uses the default settings of a run."""

import pytest

from ratchet.config import LossConfig, TrainingConfig
from tests.benchmarks._settings import LOSS, TRAINING


@pytest.mark.parametrize(("section", "values"), [(LossConfig(preset="dapo"), LOSS), (TrainingConfig(), TRAINING)])
def test_the_benchmark_trains_with_the_defaults_of_a_run(
    section: LossConfig | TrainingConfig, values: dict[str, object]
) -> None:
    assert {name: getattr(section, name) for name in values} == values
