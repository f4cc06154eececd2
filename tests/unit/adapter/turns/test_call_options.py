"""Reuse of a sample for a repeated request whose options differ from those that the sample was made for."""

from dataclasses import replace
from typing import Any

import pytest

from adapter.conversation import (
    Answer,
    Finish,
    Message,
    RequestOptions,
    ToolChoice,
    ToolForms,
    answer_from_json,
    answer_to_json,
)
from adapter.turns.call_options import CallOptions, fits


def options(**values: Any) -> CallOptions:
    max_tokens = values.pop("max_tokens", 100)
    return CallOptions.of(RequestOptions("chat", **values), max_tokens)


def answer(finish: Finish, num_tokens: int) -> Answer:
    return Answer(1, Message("assistant", "a"), finish, 10, num_tokens)


VIEWS: list[dict[str, Any]] = [
    {"tool_choice": ToolChoice(frozenset())},
    {"tool_choice": ToolChoice(frozenset({"bash"}))},
    {"parallel_calls": False},
    {"output_schema": {"type": "object"}},
    {"tool_forms": ToolForms(strict=frozenset({"bash"}))},
]


@pytest.mark.parametrize("changes", VIEWS)
def test_options_of_the_view_need_no_new_sample_unless_an_endpoint_gets_them(changes: dict[str, Any]) -> None:
    known, asked = options(), options(**changes)
    assert known.view != asked.view
    assert fits(known, asked, None, endpoint=False)
    assert not fits(known, asked, None, endpoint=True)


@pytest.mark.parametrize("changes", [{"stream": True}, {"retry": True}, {"model": "x"}, {"include_usage": True}])
def test_options_of_the_transport_change_nothing(changes: dict[str, Any]) -> None:
    assert options(**changes) == options()


def test_stop_sequences_and_logprobs_need_a_new_sample() -> None:
    stopped, plain, measured = options(stop_sequences=("x",)), options(), options(logprobs=True)
    done = answer("stop", 5)
    assert not fits(stopped, plain, done, False) and not fits(plain, stopped, done, False)
    assert not fits(plain, measured, done, False) and fits(measured, plain, done, False)


@pytest.mark.parametrize(
    ("known", "asked", "found", "expected"),
    [
        (5, 5, None, True),
        (None, None, None, True),
        (5, 500, None, False),
        (None, 5, None, False),
        (5, 500, answer("length", 5), False),
        (500, 5, answer("stop", 5), True),
        (500, 5, answer("tool_calls", 5), True),
        (500, 5, answer("stop", 6), False),
        (5, 500, answer("stop", 4), True),
    ],
)
def test_a_complete_answer_within_the_new_limit_is_kept(
    known: int | None, asked: int | None, found: Answer | None, expected: bool
) -> None:
    assert fits(options(max_tokens=known or 1000), options(max_tokens=asked or 1000), found, False) is expected


def test_a_call_with_unknown_options_counts_as_equal() -> None:
    """Another process generates it."""
    assert fits(None, options(max_tokens=3, stop_sequences=("x",), logprobs=True), answer("length", 9), True)


def test_options_are_the_same_after_they_were_stored() -> None:
    one = options(max_tokens=3, stop_sequences=("x", "y"), logprobs=True, call_key="k")
    assert CallOptions.from_json(one.to_json()) == one


def test_the_options_are_stored_with_the_answer() -> None:
    made = replace(answer("stop", 5), asked=options(max_tokens=3).to_json())
    assert answer_from_json(1, answer_to_json(made)) == made


def test_another_idempotency_key_is_another_call_and_no_key_says_nothing() -> None:
    first, second, none = (options(call_key=key) for key in ("a", "b", ""))
    assert not fits(first, second, answer("stop", 5), endpoint=False)
    assert all(
        fits(known, asked, None, endpoint=False) for known, asked in ((first, first), (none, first), (first, none))
    )
