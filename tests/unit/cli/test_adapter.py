"""The settings of the stack's adapter come from its serving plan and temporal.yaml."""

from pathlib import Path

import pytest
import yaml

from cli.parts.adapter import SettingsOfSets
from ratchet.config import RunConfig
from ratchet.temporal_settings import DEFAULT_PATH
from stack.parts import Stack
from stack.serving_plan import ServingPlan, write_plan


def test_the_adapter_keeps_as_many_sessions_as_temporal_yaml_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path)
    config = RunConfig.model_validate({"model": "/some/model", "datasets": [{"path": "unused"}]})
    write_plan(stack, ServingPlan(config=config, model_path=Path("/some/model")))
    settings = yaml.safe_load(DEFAULT_PATH.read_text())
    changed = tmp_path / "temporal.yaml"
    monkeypatch.setenv("RATCHET_TEMPORAL_CONFIG", str(changed))
    changed.write_text(yaml.safe_dump({**settings, "adapter": {"max_sessions": 7}}))
    assert SettingsOfSets(stack).read()["default"].max_sessions == 7
    del settings["adapter"]
    changed.write_text(yaml.safe_dump(settings))
    assert SettingsOfSets(stack).read()["default"].max_sessions == 2000
