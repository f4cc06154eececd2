"""Bars of a time line lie within it, and the graph of turns shows each branch in a row of its own."""

from datetime import UTC, datetime, timedelta
from typing import Any

from reads.rollouts import BoxView, RolloutHead, TurnLine
from viewer.models.timeline import build_graph, build_timeline

START = datetime(2026, 1, 1, tzinfo=UTC)


def turn(turn_id: int, parent: int | None, **values: Any) -> TurnLine:
    plain: dict[str, Any] = {
        "id": turn_id, "attempt": 1, "lane": "", "state": "completed", "kind": "main", "parent_turn_id": parent,
        "fork_cause": None, "dialect": "chat", "prompt_tokens": 1, "kept_tokens": 0, "num_sampled": 1,
        "logprobs_valid": True, "version_spans": None, "finish_reason": "stop", "unread_call": None,
        "delivered": True, "engine_wait_seconds": 0.0, "engine_id": None,
        "created_at": START + timedelta(seconds=turn_id), "completed_at": START + timedelta(seconds=turn_id + 0.5),
    }  # fmt: skip
    return TurnLine(**{**plain, **values})


def test_a_straight_conversation_is_one_row() -> None:
    graph = build_graph([turn(10, None), turn(11, 10), turn(12, 11)])
    assert graph.num_rows == 1 and [one.parent for one in graph.nodes] == [None, 0, 1]


def test_a_second_continuation_and_a_new_root_are_rows() -> None:
    graph = build_graph([turn(10, None), turn(11, 10), turn(12, 10), turn(13, None, kind="sub_agent"), turn(14, 11)])
    assert [one.row for one in graph.nodes] == [0, 0, 1, 2, 0]


def test_a_parent_that_is_not_shown_is_no_edge() -> None:
    assert build_graph([turn(20, 3)]).nodes[0].parent is None


def test_bars_lie_within_the_time_line_and_one_that_has_not_ended_reaches_now() -> None:
    head = RolloutHead(
        7, "r", 1, 1, 0, "train", 1, "t", "h", None, None, None, 0, 0, False, None, START, START + timedelta(seconds=2),
        None, {}, "w", 1, 1.0, None, "", None, None, 0, {}, "", "", None, None,
    )  # fmt: skip
    box = BoxView(3, "agent", 1, "live", "p", "x", "host", "", None, START + timedelta(seconds=4), START, None)
    turns = [turn(10, None), turn(12, 10, state="in_flight", completed_at=None)]
    timeline = build_timeline(head, [box], turns, START + timedelta(seconds=20))
    bars = {lane.name: lane.bars for lane in timeline.lanes}
    assert list(bars) == ["queue", "boot", "agent box", "generate", "tools"]
    assert all(bar.start >= 0 and bar.start + bar.width <= 1.01 for lane in timeline.lanes for bar in lane.bars)
    assert [bar.seconds for bar in bars["queue"]] == [2, 2], "for the workflow, then for a slot to boot"
    (tools,) = bars["tools"]
    assert (tools.start, tools.seconds) == (10.5 / 20, 1.5)
    assert bars["generate"][1].open and bars["generate"][1].seconds == 8
