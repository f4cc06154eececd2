"""The first difference between two conversations; the last calls of an attempt with an empty patch."""

from datetime import UTC, datetime

import pytest

from ratchet.types import JsonObject
from reads.conversation import MessageView, TurnView, first_difference, last_calls, read_conversation
from reads.turns import TurnContent

Call = tuple[str, JsonObject, str | None]


def turn(number: int, asked: str, answered: str) -> TurnView:
    def message(text: str, role: str) -> MessageView:
        return MessageView(role, text, "", [], None)

    return TurnView(
        100 + number, 1, "", "main", "completed", None, 1, 1, "stop", None, number, 1.0, None, False, "", 0,
        [message(asked, "user")], message(answered, "assistant"),
    )  # fmt: skip


def test_equal_conversations_do_not_differ() -> None:
    turns = [turn(1, "a", "b"), turn(2, "c", "d")]
    assert first_difference(turns, turns) is None
    assert first_difference(turns, turns[:1]) is None, "a shorter one is not known to differ"


def test_the_place_of_the_difference() -> None:
    found = first_difference(
        [turn(1, "a", "b"), turn(2, "c", "one two")], [turn(1, "a", "b"), turn(2, "c", "one three")]
    )
    assert found is not None
    assert (found.number, found.what, found.text[found.at :]) == (2, "answer", "hree")


def test_what_tools_returned_comes_before_the_answer() -> None:
    found = first_difference([turn(1, "x", "b")], [turn(1, "y", "z")])
    assert found is not None and found.what == "messages"


def sh(command: str, result: str | None = "(no output)") -> Call:
    return ("bash", {"command": command}, result)


def turns_of(*calls: Call) -> list[TurnView]:
    """Return a conversation of one call a turn; a result None was never sent."""
    contents = []
    messages: list[JsonObject] = [{"role": "user", "content": "Mend it."}]
    now = datetime.now(UTC)
    for number, (name, arguments, result) in enumerate([*calls, ("", {}, None)], 1):
        answer: JsonObject = {"role": "assistant", "content": "Done."}
        if name:
            answer["tool_calls"] = [{"id": f"c{number}", "function": {"name": name, "arguments": arguments}}]
        contents.append(
            TurnContent(
                number, 1, "", "main", "completed", None, 9, 9, "stop", None, now, now, None, "", 0, messages, answer
            )
        )
        sent = result is not None
        messages = [{"role": "tool", "tool_call_id": f"c{number}", "content": result}] if sent else []
    return read_conversation(contents)


CASES: list[tuple[str, list[Call]]] = [
    ("it made no tool call", []),
    ("its calls, 1: `sed -i s/a/b/ a.py` gave (no output)", [sh("sed -i s/a/b/ a.py")]),
    ("its calls, 1: `true` gave nothing", [sh("true", " \n\n")]),
    ("its calls, 1: `sleep 9` was not answered", [sh("sleep 9", None)]),
    (
        "its calls, 2: `Edit /w/a.py` gave Error: old_string not found; `git status` gave On branch main",
        [
            ("Edit", {"file_path": "/w/a.py", "old_string": "z", "new_string": "b"}, "Error: old_string not found"),
            sh("git status", "On branch main\nnothing to commit"),
        ],
    ),
    (
        "its calls, the last 3 of 4: `c` gave 3; `d` gave 4; `e` gave 5",
        [sh("b", "2"), sh("c", "3"), sh("d", "4"), sh("e", "5")],
    ),
    (f"its calls, 1: `{'x' * 80}…` gave {'y' * 80}…", [sh("x" * 81, "y" * 200)]),
]


@pytest.mark.parametrize(("told", "calls"), CASES)
def test_the_last_calls_are_told(told: str, calls: list[Call]) -> None:
    assert last_calls(turns_of(*calls)) == told
