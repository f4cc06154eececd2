"""The config of a rollout by hand: its dataset is read as the given config reads it, from its first row to its last."""

from pathlib import Path
from typing import Any

import pytest

from activities.adhoc_rollouts import _config_of
from ratchet.config import DatasetConfig
from ratchet.payloads import RolloutInput


def dataset_of(path: Path, **config: Any) -> DatasetConfig:
    (found,) = _config_of(RolloutInput(dataset=str(path), task=0, config=config)).datasets
    return found


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("{}")
    return path


def test_keys_of_the_same_dataset_are_kept_and_its_use_is_not(tasks: Path) -> None:
    (tasks.parent / "other.jsonl").write_text("{}")
    other = {"path": str(tasks.parent / "other.jsonl"), "label_key": "id"}
    found = dataset_of(tasks, datasets=[other, {"path": str(tasks), "use": "eval", "limit": 1, "label_key": "name"}])
    assert found == DatasetConfig(path=str(tasks), label_key="name")


@pytest.mark.parametrize("config", [{}, {"datasets": None}, {"datasets": ["tasks.jsonl", 3]}, {"datasets": [{}]}])
def test_a_dataset_that_the_config_does_not_name_is_read_by_default(tasks: Path, config: dict[str, Any]) -> None:
    assert dataset_of(tasks, **config) == DatasetConfig(path=str(tasks))
