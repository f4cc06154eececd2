"""The table of the brief names tests that exist, and the launcher's config agrees with what is said of it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.temporal_settings import load_temporal_settings
from tests.brief.page import read

ROOT = Path(__file__).parents[3]
FEATURES = read("features.toml")["feature"]
LAUNCHER = read("launcher.toml")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "tasks.jsonl").write_text("{}")
    path = ROOT / "configs" / "qwen36_35b_a3b_swe_8nodes.yaml"
    return load_config(path, [], {"PROMPT_DATA": str(tmp_path / "tasks.jsonl")})


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_of_the_table_exists() -> None:
    named = [test.partition("::") for one in FEATURES for test in one["tests"]]
    assert [path for path, _, name in named if name not in functions(ROOT / path)] == []
    assert [one["where"] for one in FEATURES if not (ROOT / one["where"]).exists()] == []


def test_every_row_is_proven_or_says_what_is_missing() -> None:
    assert len(FEATURES) >= 134 and [one["line"] for one in FEATURES] == sorted(one["line"] for one in FEATURES)
    assert [one["what"] for one in FEATURES if not one["tests"]] == []
    assert [one["what"] for one in FEATURES if one.get("state") and not one.get("note")] == []
    assert {one.get("state", "") for one in FEATURES} <= {"", "partly", "no"}


def test_every_key_of_the_launchers_config_is_compared(config: RunConfig) -> None:
    values = {key: "none" if value is None else value for key, value in leaves(config.model_dump(mode="json"))}
    same, different, ours = LAUNCHER["same"], LAUNCHER["different"], LAUNCHER["ours"]["keys"]
    assert sorted([*same, *different, *ours]) == sorted(values)
    assert {key: values[key] for key in same} == {key: value for key, (_, value) in same.items()}


def test_the_guard_is_the_sum_of_the_brief(config: RunConfig) -> None:
    margin = load_temporal_settings().rollout.guard_margin
    assert config.limits.agent_seconds + config.limits.eval_seconds + margin == 1800 + 600 + 180
