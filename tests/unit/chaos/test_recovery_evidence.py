"""The judge of the recovery bench can fail: each thing that may go wrong is found, and nothing else is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks._recovery_evidence import Call, Findings, _examine_one, count_tokens, read_calls
from tests.chaos.seeded_engine import MemberScript

SCRIPT = MemberScript(("ls", "echo two > a.txt"), (1.0, 1.0, 1.0), solves=True)
SEEN = {0: 30, 1: 40, 2: 5}
GOOD: dict[str, Any] = {
    "id": 1,
    "outcome": "graded",
    "outcome_reason": "",
    "reward": 1.0,
    "num_grades": 1,
    "num_turns": 3,
    "num_span_tokens": 75,
}


@pytest.mark.parametrize(
    ("change", "seen", "kind"),
    [
        ({}, SEEN, None),
        ({"reward": 0.0}, SEEN, "wrong"),
        ({"outcome": "infra_failed", "reward": None}, SEEN, "missing"),
        ({"outcome": None, "reward": None}, SEEN, "missing"),
        ({"num_turns": 2}, SEEN, "missing"),
        ({"num_span_tokens": 70}, SEEN, "missing"),
        ({"num_span_tokens": 80}, SEEN, "duplicates"),
        ({"num_grades": 2}, SEEN, "duplicates"),
        ({"num_grades": 0}, SEEN, "invented"),
        ({"num_turns": 2, "num_span_tokens": 70}, {0: 30, 1: 40}, "invented"),
    ],
)
def test_what_is_wrong_with_a_rollout_is_found(change: dict[str, Any], seen: dict[int, int], kind: str | None) -> None:
    found = Findings()
    _examine_one(found, GOOD | change, seen, SCRIPT)
    kinds = {name for name in ("duplicates", "missing", "wrong", "invented") if getattr(found, name)}
    assert kinds == ({kind} if kind else set())


def call(rollout: int, asked_at: float, ended_at: float | None, is_answered: bool = True) -> Call:
    return Call(f"turn-{rollout}", rollout, 1, 0, 10, asked_at, ended_at, is_answered)


def test_a_call_in_flight_may_be_asked_again_and_a_stored_one_may_not() -> None:
    lost = [call(1, 8.0, 10.5, is_answered=False), call(1, 12.0, 14.0)]
    tokens = count_tokens(lost, set(), began_at=10.0, over_at=11.0, ended_at=20.0)
    assert (tokens.again, tokens.in_flight) == (10, 10)
    needless = [call(1, 5.0, 7.0), call(1, 12.0, 14.0)]
    tokens = count_tokens(needless, set(), began_at=10.0, over_at=11.0, ended_at=20.0)
    assert (tokens.again, tokens.in_flight) == (10, 0)


def test_an_answer_on_its_way_to_the_store_is_in_flight_once() -> None:
    """The engine had answered, and the fault hit the adapter before it stored the answer."""
    on_its_way = [call(1, 8.0, 9.9), call(1, 12.0, 14.0)]
    tokens = count_tokens(on_its_way, {"turn-1"}, began_at=10.0, over_at=11.0, ended_at=20.0)
    assert (tokens.again, tokens.in_flight) == (10, 10)
    given_up = [replace(on_its_way[0], asked_at=1.0, ended_at=2.0, attempt=0), *on_its_way]
    tokens = count_tokens(given_up, {"turn-1"}, began_at=10.0, over_at=11.0, ended_at=20.0)
    assert tokens.in_flight == 10, "the attempt before it is over"


def test_calls_of_an_engine_that_died_are_not_in_flight(tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    asked = {"event": "asked", "turn": "turn-1", "rollout": 1, "attempt": 1, "number": 0, "tokens": 10}
    lines = [
        {"event": "started", "at": 0.0},
        {**asked, "at": 1.0},
        {"event": "started", "at": 2.0},
        {**asked, "at": 3.0},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "answ')
    first, second = read_calls(log)
    assert (first.ended_at, first.is_answered, second.ended_at) == (2.0, False, None)
