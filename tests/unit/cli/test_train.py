"""The table at the end of `ratchet train`."""

import pytest

from cli.train import COLUMNS, _print_steps


def test_a_metric_that_a_step_lacks_is_left_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of an endpoint have no logprobs, so their steps have no mismatch."""
    metrics = {name: 0.25 for name, _ in COLUMNS.values() if name != "training_reward"}
    lacking = {name: value for name, value in metrics.items() if not name.startswith("mismatch")}
    steps = [{"step": 1, "metrics": metrics, "reward": 0.65}, {"step": 2, "metrics": lacking, "reward": 0.5}]
    _print_steps({"run_id": "r", "steps": steps})
    printed = capsys.readouterr().out
    assert "training reward" in printed and "reward_mean" not in metrics, "it is that of pages and tiles"
    first, second = [line.split() for line in printed.splitlines() if line.strip()[:1] in "12"]
    assert (*first[:2], *second[:2]) == ("1", "0.650", "2", "0.500") and len(second) < len(first) == 1 + len(COLUMNS)
