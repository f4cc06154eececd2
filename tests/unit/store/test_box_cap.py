"""Moves of the adaptive limit of agents' boxes."""

from itertools import pairwise

import pytest

from store.box_cap import FLOOR, Load, first_cap, next_cap

IDLE = Load(boxes=0, calls=0, engine_slots=64, refused=0, endpoint_waits=0, free_memory=0.5)


def load(**changes: float) -> Load:
    values = {name: getattr(IDLE, name) for name in Load.__slots__}
    return Load(**(values | changes))


def test_it_grows_to_the_configs_limit_and_no_further() -> None:
    cap = first_cap(64)
    limits = [cap.limit]
    while limits[-1] < 64:
        limits.append(next_cap(limits[-1], 64, load(boxes=limits[-1])).limit)
    assert limits[0] == 16 and {b - a for a, b in pairwise(limits)} == {2}
    last = next_cap(64, 64, load(boxes=64))
    assert (last.limit, last.cause) == (64, "sandbox.max_boxes")


@pytest.mark.parametrize(
    ("full", "words"),
    [
        ({"calls": 80}, "16 of 80 model calls wait"),
        ({"refused": 3}, "no room for 3 boxes"),
        ({"free_memory": 0.03}, "3% of the memory"),
        ({"endpoint_waits": 5}, "5 rollouts wait for their endpoint"),
    ],
)
def test_it_shrinks_if_something_is_full_and_says_what(full: dict[str, float], words: str) -> None:
    cap = next_cap(40, 64, load(boxes=40, **full))
    assert cap.limit == 30 and words in cap.cause
    waiting = next_cap(30, 64, load(boxes=38, **full))
    assert waiting.limit == 30 and "38 boxes are still in use" in waiting.cause, "boxes that run are not ended"
    assert next_cap(30, 64, load(boxes=30, **full)).limit == 22
    assert next_cap(30, 64, load(boxes=30)).limit == 32, "it grows again when nothing is full"


@pytest.mark.parametrize("max_boxes", [2, 3, FLOOR, 5])
def test_small_limits_stay_within_the_configs(max_boxes: int) -> None:
    assert first_cap(max_boxes).limit <= max_boxes
    assert next_cap(max_boxes, max_boxes, load(boxes=max_boxes, refused=1)).limit == min(max_boxes, FLOOR)
    assert next_cap(1, max_boxes, load(boxes=1)).limit == 2


def test_a_call_beyond_the_slots_counts_only_if_there_are_slots() -> None:
    assert not load(calls=9, engine_slots=0).fullness(), "without an engine the calls wait, which is no queue"
