"""The first difference between two conversations."""

from reads.conversation import MessageView, TurnView, first_difference


def turn(number: int, asked: str, answered: str) -> TurnView:
    def message(text: str, role: str) -> MessageView:
        return MessageView(role, text, "", [], None)

    return TurnView(
        100 + number, number, 1, "", "main", "completed", None, 1, 1, "stop", None, 1.0, None, False, "", 0,
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
