"""The figures that a run prints."""

import numpy as np
import pytest

from ratchet.solve_rates import interval
from stack.curve import summary


def rows(label: str, rewards: dict[str, list[float]], dataset: str = "d.jsonl") -> list[dict[str, object]]:
    return [
        {"label": label, "task": task, "family": task[0], "reward": reward, "dataset": dataset}
        for task, values in rewards.items()
        for reward in values
    ]


def test_the_difference_is_paired_by_task() -> None:
    before, after = {"a1": [0.0, 1.0], "b1": [0.0]}, {"a1": [1.0, 1.0], "b1": [1.0], "c1": [1.0]}
    report = summary(rows("start-t1", before) + rows("end-t1", after))
    assert report["differences"]["t1"]["mean"] == pytest.approx(0.75)  # a: 0.5, b: 1.0; c has no rate before
    assert report["differences"]["t1"]["tasks"] == 2
    assert report["families"]["t1"]["a"] == {"start": 0.5, "end": 1.0}
    assert report["datasets"] == {}


def test_several_datasets_are_reported_one_by_one() -> None:
    first = rows("start-t1", {"a1": [0.0], "a2": [1.0]}) + rows("end-t1", {"a1": [1.0], "a2": [1.0]})
    second = rows("start-t1", {"b1": [1.0]}, "e.jsonl") + rows("end-t1", {"b1": [0.0]}, "e.jsonl")
    found = summary(first + second)["datasets"]["t1"]
    assert [(found[name]["start"], found[name]["end"]) for name in "de"] == [(0.5, 1.0), (1.0, 0.0)]
    assert (found["d"]["difference"]["mean"], found["d"]["difference"]["tasks"]) == (0.5, 2)
    assert found["e"]["difference"]["mean"] == -1.0


def test_the_interval_covers_the_mean_of_a_known_distribution() -> None:
    values = np.random.default_rng(3).binomial(1, 0.3, size=400).astype(np.float64)
    found = interval(values)
    mean, low, high = found.mean, found.low, found.high
    assert low < mean < high
    assert high - low == pytest.approx(2 * 1.96 * (0.3 * 0.7 / 400) ** 0.5, rel=0.15)


def test_no_difference_has_an_interval_around_zero() -> None:
    same = {f"a{n}": [float(n % 2)] for n in range(50)}
    found = summary(rows("start-greedy", same) + rows("end-greedy", same))["differences"]["greedy"]
    assert (found["mean"], found["low"], found["high"]) == (0, 0, 0)
