"""The table at the end of `ratchet train`."""

import pytest

from cli.train import COLUMNS, _print_steps


def test_a_metric_that_a_step_lacks_is_left_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of an endpoint have no logprobs, so their steps have no mismatch."""
    metrics = {name: 0.25 for name, _ in COLUMNS.values()}
    lacking = {name: value for name, value in metrics.items() if not name.startswith("mismatch")}
    _print_steps({"run_id": "r", "steps": [{"step": 1, "metrics": metrics}, {"step": 2, "metrics": lacking}]})
    first, second = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1] in "12"]
    assert (first[0], second[0]) == ("1", "2") and len(second) < len(first) == 1 + len(COLUMNS)
