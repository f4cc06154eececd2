"""The reasoning that belongs to an answer that came back without it; never a wrong one."""

from adapter.conversation import Message, MessageRun, ToolCall
from adapter.turns.reasoning_index import ReasoningIndex
from adapter.turns.tree import TurnTree
from ratchet.types import TurnKind
from tests.unit.adapter.turns.test_tree import grow, ids


def answer(text: str, reasoning: str = "", *call_ids: str) -> Message:
    return Message("assistant", text, reasoning, tuple(ToolCall(one, "bash", {}) for one in call_ids))


def run(message: Message) -> MessageRun:
    return MessageRun.of([message])


def test_an_answer_is_found_by_its_history_its_calls_or_its_text() -> None:
    index = ReasoningIndex()
    index.add(1, b"h1", answer("Done.", "first"))
    index.add(2, b"h2", answer("Done.", "second"))
    index.add(3, b"h1", answer("", "third", "c3"))
    index.add(4, b"h1", answer("Once.", "fourth"))
    assert [index.find(key, run(answer("Done."))) for key in (b"h1", b"h2", b"h3")] == ["first", "second", ""]
    assert index.find(b"h1", run(answer(" Done.\n"))) == "first"
    assert [index.find(key, run(answer("", "", "c3"))) for key in (b"h1", b"h9")] == ["third", "third"]
    assert index.find(b"h9", run(answer("", "", "c4"))) == ""
    assert index.find(b"h9", run(answer("Once."))) == "fourth"
    assert index.find(b"h1", run(answer("Done.", "own"))) == ""
    assert index.find(b"h1", run(Message("user", "Done."))) == ""


def test_two_samples_with_equal_texts_are_not_confused() -> None:
    """Without tool-call ids it is not certain which of them came back."""
    index = ReasoningIndex()
    index.add(1, b"h", answer("Done.", "one"))
    index.add(2, b"h", answer("Done.", "two"))
    assert index.find(b"h", run(answer("Done."))) == "" and index.knows(b"h", run(answer("Done.")))
    index.add(3, b"h", answer("", "three", "c3"))
    index.add(4, b"h", answer("", "four", "c4"))
    assert [index.find(b"h", run(answer("", "", one))) for one in ("c3", "c4")] == ["three", "four"]


def test_an_answer_that_was_sampled_without_reasoning_stays_so() -> None:
    tree = TurnTree()
    grow(tree, 1, ids(1), ids(2), answer("Done.", "thought"), key=b"h")
    grow(tree, 2, ids(1), ids(3), answer("Done."), key=b"h")
    assert tree.with_reasoning(b"h", run(answer("Done."))).messages[0].reasoning == ""
    assert tree.last_answers[""] == (TurnKind.MAIN, "Done.")


def calling(text: str, *call_ids: str) -> MessageRun:
    return run(answer(text, "", *call_ids))


def test_tool_call_ids_alone_say_whose_reasoning_it_is() -> None:
    """Also if the client changed all else, and in any history."""
    index = ReasoningIndex()
    index.add(1, b"h1", answer("Looking.", "one", "a"))
    index.add(2, b"h2", answer("", "two", "b", "c", "d"))
    index.add(3, b"h3", answer("Looking.", "", "e"))
    for key in (b"h1", b"h9"):
        assert index.find(key, calling("rewritten", "a")) == "one"
        assert index.find(key, calling("", "a")) == "one"
    # Parallel calls in another order, split over two messages, some of them left out.
    assert index.find(b"h2", calling("", "d", "b", "c")) == "two"
    assert [index.find(b"h2", calling("", *ids)) for ids in (("b", "d"), ("c",), ("c", "d"))] == ["two", "", ""]
    # Two answers merged into one message.
    assert index.find(b"h1", calling("Looking.", "a", "b", "c")) == "one\ntwo"
    assert index.find(b"h1", calling("", "a", "unknown")) == "one"


def test_a_known_answer_without_reasoning_never_gets_that_of_its_sibling() -> None:
    """Equal but for ids and outer white space: only the ids say which one came back."""
    index = ReasoningIndex()
    index.add(1, b"h", answer("Looking.", "one", "a"))
    index.add(2, b"h", answer("Looking.", "", "b"))
    assert index.find(b"h", calling("Looking.\n", "b")) == "" and index.find(b"h", calling("Looking.\n", "a")) == "one"
    assert index.find(b"h", calling("Looking.\n", "made by the client")) == "one"


def test_reasoning_that_the_text_already_shows_is_not_put_back() -> None:
    """A client may have written it there. An answer that quotes its own reasoning gets it back."""
    index = ReasoningIndex()
    index.add(1, b"h", answer("Looking.", "first look", "a"))
    index.add(2, b"h", answer("So: first look", "first look", "b"))
    assert index.find(b"h", calling("<think>first look</think>Looking.", "a")) == ""
    assert index.find(b"h", calling("rewritten", "a")) == "first look"
    assert index.find(b"h", calling("So: first look!", "b")) == "first look"
    assert index.find(b"h", calling("first look\nSo: first look", "b")) == ""
