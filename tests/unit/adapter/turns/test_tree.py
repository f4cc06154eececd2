"""To which turn of the tree a request attaches, and why it leaves a stream.

Fork causes are counted, and they decide what drift mode `drop` leaves out.
"""

from typing import Any

import numpy as np
import pytest

from adapter.conversation import Message, MessageRun, ToolCall, extend_key
from adapter.prompt.renderer import Renderer
from adapter.turns.forks import cause_of, kind_of
from adapter.turns.tree import AttachPoint, TurnGrowth, TurnTree
from ratchet.types import ForkCause, TurnKind
from tests.unit.adapter.client import DIALECT, builder_of, new_session


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


ANSWER = Message("assistant", "a")


def grow(
    tree: TurnTree,
    turn_id: int,
    prompt: np.ndarray,
    sampled: np.ndarray,
    answer: Message = ANSWER,
    lane: str = "",
    key: bytes = b"k",
) -> AttachPoint:
    attach_point = tree.attach(prompt, None)
    growth = TurnGrowth([key], answer, lane, TurnKind.MAIN, ended=True, thinks=False, loose_key=key)
    tree.add(turn_id, attach_point, tree.prompt(attach_point, prompt[attach_point.kept_tokens :]), sampled, growth)
    return attach_point


def test_streams_share_buffers_and_do_not_change() -> None:
    tree = TurnTree()
    grow(tree, 1, ids(1, 2), ids(3))
    grow(tree, 2, ids(1, 2, 3, 4), ids(5))
    grow(tree, 3, ids(1, 2, 3, 4, 5, 6), ids(7))
    grow(tree, 4, ids(1, 2, 3, 4, 5, 8), ids(9))
    assert [tree.stream(turn_id).tolist() for turn_id in (1, 2, 3, 4)] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 8, 9],
    ]
    assert len(tree._buffers) == 2
    assert 4 in tree.nodes[2].children
    assert sum(tree._buffers.values()) == 14


def test_a_known_base_gives_the_same_attach_point_as_a_full_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = TurnTree()
        for turn_id in range(1, 12):
            base = int(rng.integers(0, turn_id)) or None
            known = tree.stream(base) if base else ids()
            prompt = np.concatenate([known, rng.integers(0, 2, rng.integers(1, 4)).astype(np.int32)])
            attach_point = tree.attach(prompt, base)
            searched = tree.attach(prompt, None)
            assert attach_point.kept_tokens == searched.kept_tokens
            grow(tree, turn_id, prompt, np.array([100 + turn_id, *rng.integers(0, 2, 2)], np.int32))


def test_an_answer_is_found_if_a_template_cannot_distinguish_it() -> None:
    tree = TurnTree()
    call = ToolCall("call_1", "bash", {"b": 1.0, "a": "x"})
    grow(tree, 1, ids(1), ids(2), Message("assistant", "t", "", (call,)))

    def found(message: Message) -> bool:
        return tree.turn_of_answer(b"k", MessageRun.of([message]), "") is not None

    assert found(Message("assistant", "t", "", (ToolCall("call_1", "bash", {"a": "x", "b": 1}),)))
    assert found(Message("assistant", " t\n", "", (ToolCall("other", "bash", {"a": "x", "b": 1}),)))
    assert not found(Message("assistant", "t", "", (ToolCall("call_1", "bash", {"a": "y", "b": 1}),)))
    assert not found(Message("assistant", "t"))


@pytest.mark.parametrize("number", [2**53 + 1, 12345678901234567890, 2**64 - 1])
def test_a_number_is_the_same_after_javascript_has_read_it(number: int) -> None:
    """The strict key, of which stored keys are made, is not changed by that."""
    sent, back = (
        MessageRun.of([Message("assistant", "", "", (ToolCall("c", "bash", {"n": [value], "b": True}),))])
        for value in (number, float(number))
    )
    assert sent.loose_key == back.loose_key and sent.key != back.key
    other = MessageRun.of([Message("assistant", "", "", (ToolCall("c", "bash", {"n": [number * 2.0], "b": True}),))])
    assert other.loose_key != sent.loose_key


def test_equal_samples_are_distinguished_by_tool_ids_and_lane() -> None:
    tree = TurnTree()
    for turn_id, (call_id, lane) in enumerate((("one", ""), ("two", ""), ("one", "agent")), start=1):
        grow(tree, turn_id, ids(1), ids(turn_id), Message("assistant", "", "", (ToolCall(call_id, "bash", {}),)), lane)

    def answered(call_id: str, lane: str) -> int | None:
        return tree.turn_of_answer(
            b"k", MessageRun.of([Message("assistant", "", "", (ToolCall(call_id, "bash", {}),))]), lane
        )

    assert [answered("one", ""), answered("two", ""), answered("one", "agent")] == [1, 2, 3]
    assert answered("three", "") is None  # ambiguous without the id
    assert tree.has_similar_answer(
        b"k", MessageRun.of([Message("assistant", "", "", (ToolCall("three", "bash", {}),))])
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SUMMARY = "The parser was fixed in reader.py and two of the five tests pass now."
LONG = "a question with enough words in it that most of the prompt is shared with any other like it"


class Conversation:
    """A session of wire messages; the sampled ids of each answer are those of the tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.builder = builder_of(renderer)
        self.session = new_session()
        self.number = 0

    async def turn(
        self, messages: list[dict[str, Any]], answer: str, lane: str = "", end: str = "<|im_end|>", reasoning: str = ""
    ) -> ForkCause | None:
        import orjson

        body = orjson.dumps({"messages": messages, "system": "sys", "max_tokens": 5})
        prepared = await self.builder.prepare(
            self.session, body, DIALECT, {"x-claude-code-agent-id": lane} if lane else {}
        )
        self.number += 1
        self.kind = prepared.kind
        stop = [self.renderer.tokenizer.plain.token_to_id(end)] if end else []
        shown = f"<think>\n{reasoning}\n</think>\n\n{answer}" if reasoning else answer
        ids = self.renderer.tokenizer.plain.encode(shown, add_special_tokens=False).ids
        sampled = np.array([*ids, *stop], np.int32)
        message = Message("assistant", answer, reasoning)
        growth = TurnGrowth(
            prepared.new_keys,
            message,
            lane,
            prepared.kind,
            self.renderer.ended(sampled),
            prepared.thinks or bool(reasoning),
            prepared.request.loose_keys[-1],
        )
        self.session.tree.add(self.number, prepared.attach_point, prepared.stream, sampled, growth)
        return prepared.fork_cause


async def test_causes(renderer: Renderer) -> None:
    conversation = Conversation(renderer)
    first = [user(LONG)]
    assert await conversation.turn(first, "one") is ForkCause.ROOT
    assert await conversation.turn([*first, assistant("one"), user("go")], "two") is None
    assert await conversation.turn([*first, assistant("one"), user("other")], "three") is ForkCause.EDIT
    assert await conversation.turn([*first, assistant("changed"), user("go")], "four") is ForkCause.EDIT
    assert await conversation.turn(first, "five") is ForkCause.RESTART
    assert await conversation.turn([user(LONG)], "six", lane="agent") is ForkCause.SUB_AGENT
    assert await conversation.turn([user(LONG), assistant("six"), user("go")], "seven", lane="agent", end="") is None
    longer = [user(LONG), assistant("six"), user("go"), assistant("seven"), user("more")]
    assert await conversation.turn(longer, "eight", lane="agent") is ForkCause.STOP


async def test_an_equal_message_without_its_sampled_ids_is_drift(renderer: Renderer) -> None:
    conversation = Conversation(renderer)
    first = [user(LONG)]
    await conversation.turn(first, "one ")
    await conversation.turn(first, "one\n")
    # Which of the two answers came back is ambiguous.
    assert await conversation.turn([*first, assistant("one"), user("go")], "x") is ForkCause.DRIFT


async def test_dropped_thinking_is_a_fork_of_its_own(renderer: Renderer) -> None:
    conversation = Conversation(renderer)
    first = [user(LONG)]
    await conversation.turn(first, "one", reasoning="deep")
    thought = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "deep", "signature": "s"}, {"type": "text", "text": "one"}],
    }
    assert await conversation.turn([*first, thought, user("next question")], "two") is ForkCause.THINKING


async def test_a_conversation_that_opens_with_a_summary_is_a_compaction(renderer: Renderer) -> None:
    conversation = Conversation(renderer)
    first = [user(LONG)]
    await conversation.turn(first, "one")
    question = user("Your task is to create a detailed summary of the conversation so far.")
    assert await conversation.turn([*first, assistant("one"), question], SUMMARY) is None
    assert conversation.kind is TurnKind.COMPACTION
    assert await conversation.turn([user("This session goes on.\n" + SUMMARY)], "three") is ForkCause.COMPACTION
    assert conversation.kind is TurnKind.MAIN


async def test_a_summary_of_all_but_the_last_exchange(renderer: Renderer) -> None:
    """As Claude Code does it: the request for a summary omits the last exchange, which then follows the summary
    unchanged.
    """
    conversation = Conversation(renderer)
    first = [user(LONG)]
    await conversation.turn(first, "one")
    kept = [assistant("one"), user("go")]
    await conversation.turn([*first, *kept], "two")
    question = {"type": "text", "text": "Your task is to create a detailed summary of the conversation so far."}
    assert (
        await conversation.turn([{"role": "user", "content": [{"type": "text", "text": LONG}, question]}], "short")
        is ForkCause.COMPACTION
    )
    assert (
        await conversation.turn([user("It goes on: short"), *kept, assistant("two"), user("on")], "three")
        is ForkCause.COMPACTION
    )
    assert await conversation.turn([user("Another opening"), *kept], "four") is ForkCause.EDIT


@pytest.mark.parametrize(
    ("text", "kind"), [("fix it", TurnKind.MAIN), ("Generate a short title for this", TurnKind.AUXILIARY)]
)
def test_kinds(text: str, kind: TurnKind) -> None:
    from adapter.conversation import RequestOptions

    assert kind_of(RequestOptions("messages"), "", [MessageRun.of([Message("user", text)])]) is kind


def test_the_first_prompt_is_a_root() -> None:
    tree = TurnTree()
    run = MessageRun.of([Message("user", "x")])
    keys = [b"h", extend_key(b"h", run.key)]
    assert cause_of(tree, AttachPoint(None, 0), 3, "", [run], keys, False) is ForkCause.ROOT
    assert cause_of(tree, AttachPoint(None, 0), 3, "agent", [run], keys, False) is ForkCause.SUB_AGENT


def test_the_text_of_a_tool_result_is_not_taken_for_a_request() -> None:
    """A file that quotes a request for a title or a summary makes a turn neither auxiliary nor a compaction."""
    from adapter.conversation import RequestOptions

    for text in ("Generate a short title for this", "create a detailed summary of the conversation"):
        assert (
            kind_of(RequestOptions("messages"), "", [MessageRun.of([Message("tool", text, tool_call_id="c")])])
            is TurnKind.MAIN
        )
    assert (
        kind_of(RequestOptions("messages"), "Write a short title", [MessageRun.of([Message("user", "x")])])
        is TurnKind.AUXILIARY
    )
