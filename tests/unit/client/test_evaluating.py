"""The config of a run that only evaluates, and the public name of the client."""

from pathlib import Path

import pytest

from client.evaluating import EvaluationSettings, endpoint_config, evaluation_config
from ratchet.config import EndpointConfig, RunConfig
from ratchet.errors import ConfigError
from ratchet.types import JsonObject


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("train.jsonl", "heldout.jsonl")]
    for path in found:
        path.write_text("")
    return found


def wanted(rows: list[JsonObject], **settings: object) -> RunConfig:
    values = {"datasets": rows, "training": {"steps": 9, "group_size": 4}, "evaluation": {"every": 2}}
    return evaluation_config(RunConfig.model_validate(values), EvaluationSettings(**settings))  # type: ignore[arg-type]


def test_held_out_tasks_are_evaluated_and_no_step_is_trained(paths: list[Path]) -> None:
    train, held_out = paths
    config = wanted(
        [{"path": str(train), "weight": 2}, {"path": str(held_out), "use": "eval"}], temperatures=(0.7, 0.0), samples=8
    )
    assert [(one.path, one.use, one.weight) for one in config.datasets] == [(str(held_out), "eval", None)]
    assert config.training.steps == 0
    assert (config.evaluation.at, config.evaluation.temperatures, config.evaluation.samples) == (
        ["start"],
        [0.7, 0.0],
        8,
    )
    assert config.evaluation.every is None


def test_without_held_out_tasks_all_are_evaluated(paths: list[Path]) -> None:
    config = wanted([{"path": str(path)} for path in paths])
    assert [one.use for one in config.datasets] == ["eval", "eval"]


def test_named_datasets_replace_those_of_the_config(paths: list[Path]) -> None:
    config = wanted([{"path": str(paths[0])}], datasets=(paths[1],))
    assert [(one.path, one.use) for one in config.datasets] == [(str(paths[1]), "eval")]


def test_an_endpoint_needs_a_config_and_the_name_of_its_model(tmp_path: Path, paths: list[Path]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("datasets: [{path: heldout.jsonl, use: eval}]\ntraining: {steps: 0}\n")
    url = "https://api.example.org/v1"
    for settings, missing in (({"model": "m"}, "--config"), ({"config": file}, "--model")):
        with pytest.raises(ConfigError, match=missing):
            endpoint_config(url, EvaluationSettings(**settings))  # type: ignore[arg-type]
    found = endpoint_config(url, EvaluationSettings(config=file, model="m", key="${KEY}", body={"top_p": 0.9}))
    assert found.endpoint == EndpointConfig(url=url, model="m", key="${KEY}", body={"top_p": 0.9})
    assert evaluation_config(found, EvaluationSettings()).endpoint == found.endpoint
    assert not found.uses_model
    assert endpoint_config(url, EvaluationSettings(config=file, model="m", tokens=True)).uses_model
