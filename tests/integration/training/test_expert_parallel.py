"""Ranks that divide the experts, and the tokens of bins, under kills: the weights are those of the undisturbed run."""

import shutil
from pathlib import Path

import pytest

from store.database import Database
from tests.integration.training.records import make_config
from tests.integration.training.test_faults import Runs
from tests.unit.training.test_gradients import arguments_of, make_architecture


@pytest.mark.parametrize("sequence_parallel", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_kills_change_nothing(sequence_parallel: int, database: Database, model: Path, tmp_path: Path) -> None:
    name = "Qwen3MoeForCausalLM"
    experts = make_architecture(name, tmp_path, **arguments_of(name), vocab_size=400)
    for file in model.glob("*token*"):
        shutil.copy(file, experts)
    training = {"steps": 3, "expert_parallel": 2, "sequence_parallel": sequence_parallel}
    config = make_config(training=training)
    runs = Runs(database, experts, tmp_path, config)
    undisturbed, killed = await runs.make(), await runs.make()
    assert await runs.train(undisturbed, 2, []) == 1
    assert await runs.train(killed, 2, [("step", 1, 1), ("save", 2, 0)]) == 3
    assert await runs.digest(killed) == await runs.digest(undisturbed)
    for settings in (undisturbed, killed):
        await runs.assert_trained_once(settings)
