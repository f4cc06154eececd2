"""Bars of a time line lie within it, and the graph of turns shows each branch in a row of its own."""

from datetime import UTC, datetime, timedelta
from typing import Any

from ratchet.store.views.rollout_views import TurnLine
from viewer.models.timeline import build_graph

START = datetime(2026, 1, 1, tzinfo=UTC)


def turn(turn_id: int, parent: int | None, **values: Any) -> TurnLine:
    plain: dict[str, Any] = {
        "id": turn_id, "attempt": 1, "lane": "", "state": "completed", "kind": "main", "parent_turn_id": parent,
        "fork_cause": None, "dialect": "chat", "prompt_tokens": 1, "kept_tokens": 0, "num_sampled": 1,
        "logprobs_valid": True, "version_spans": None, "finish_reason": "stop", "delivered": True,
        "engine_wait_seconds": 0.0, "engine_id": None, "created_at": START + timedelta(seconds=turn_id),
        "completed_at": START + timedelta(seconds=turn_id + 0.5),
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
