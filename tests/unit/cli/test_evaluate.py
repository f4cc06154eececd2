"""The tables of `ratchet evaluate`: over how many tasks each estimate is, and how many a comparison leaves out."""

from dataclasses import asdict

import pytest

from cli.evaluate import _estimate, _print_comparison
from ratchet.solve_rates import SolvedCount, compare
from ratchet.types import JsonObject


@pytest.mark.parametrize(
    ("num_tasks", "expected"), [(4, "0.500 [0.250, 0.750] (3 tasks)"), (3, "0.500 [0.250, 0.750]")]
)
def test_an_estimate_over_fewer_tasks_says_so(num_tasks: int, expected: str) -> None:
    assert _estimate({"mean": 0.5, "low": 0.25, "high": 0.75, "num_tasks": 3}, num_tasks) == expected
    assert _estimate({"mean": 0.5, "low": 0.25, "high": 0.75, "num_tasks": 0}, num_tasks) == ""


@pytest.mark.parametrize(
    ("second", "expected"), [(["a", "b"], "over 2 tasks\n"), (["b", "c"], "over 1 tasks; 2 without")]
)
def test_a_comparison_says_how_many_tasks_it_leaves_out(
    capsys: pytest.CaptureFixture[str], second: list[str], expected: str
) -> None:
    first = {name: SolvedCount(2, 1) for name in ("a", "b")}
    found: JsonObject = asdict(compare(first, {name: SolvedCount(2, 2) for name in second}))
    _print_comparison({"first": "r:start", "second": "r:end", **found})
    assert expected in capsys.readouterr().out
