"""Moves of the adaptive limit of agents' boxes."""

from itertools import pairwise
from typing import Any

import pytest

from store.box_cap import FLOOR, Load, MachineLoad, next_cap

IDLE = Load(boxes=0, calls=0, engine_slots=64, refused=0, endpoint_waits=0, machine=MachineLoad(0.5, 0.0))


def load(**changes: Any) -> Load:
    values = {name: getattr(IDLE, name) for name in Load.__slots__}
    return Load(**(values | changes))


def test_it_grows_to_the_configs_limit_and_no_further() -> None:
    limits = [16]
    while limits[-1] < 64:
        limits.append(next_cap(limits[-1], 64, load(boxes=limits[-1])).limit)
    assert {b - a for a, b in pairwise(limits)} == {8}
    last = next_cap(64, 64, load(boxes=64))
    assert (last.limit, last.cause) == (64, "sandbox.max_boxes")


@pytest.mark.parametrize(
    ("full", "words"),
    [
        ({"calls": 100}, "36 of 100 model calls wait"),
        ({"refused": 3}, "no room for 3 boxes"),
        ({"machine": MachineLoad(0.03, 0.0)}, "3% of the memory"),
        ({"machine": MachineLoad(0.5, 7.4)}, "stages begin 7 s late"),
        ({"endpoint_waits": 5}, "5 rollouts wait for their endpoint"),
    ],
)
def test_it_shrinks_if_something_is_full_and_says_what(full: dict[str, Any], words: str) -> None:
    cap = next_cap(40, 64, load(boxes=40, **full))
    assert cap.limit == 30 and words in cap.cause
    waiting = next_cap(30, 64, load(boxes=38, **full))
    assert waiting.limit == 30 and "38 boxes are still in use" in waiting.cause, "boxes that run are not ended"
    assert next_cap(30, 64, load(boxes=30, **full)).limit == 22
    assert next_cap(30, 64, load(boxes=30)).limit == 38, "it grows again when nothing is full"


@pytest.mark.parametrize("max_boxes", [2, 3, FLOOR, 5])
def test_small_limits_stay_within_the_configs(max_boxes: int) -> None:
    assert next_cap(max_boxes, max_boxes, load(boxes=max_boxes, refused=1)).limit == min(max_boxes, FLOOR)
    assert next_cap(1, max_boxes, load(boxes=1)).limit == 2


def test_a_call_beyond_the_slots_counts_only_if_there_are_slots() -> None:
    assert not load(calls=9, engine_slots=0).fullness(), "without an engine the calls wait, which is no queue"


def test_a_short_queue_keeps_the_engines_full() -> None:
    """Three quarters of the calls that are too many still take all slots."""
    assert not load(calls=96).fullness() and load(calls=97).fullness()
    assert IDLE.engine_slots < 97 * 0.75
