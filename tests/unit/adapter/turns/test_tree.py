"""Where requests join the turn tree, and why they leave it.

Why here: fork causes are counted and decide what `drop` forgets.
Called by: pytest.
"""

from typing import Any

import numpy as np
import pytest

from adapter.conversation import Message, MessageRun, ToolCall, extend_key
from adapter.prompt.renderer import Renderer
from adapter.turns.forks import cause_of, kind_of
from adapter.turns.tree import AttachPoint, TurnGrowth, TurnTree
from ratchet.types import ForkCause, TurnKind
from tests.unit.adapter.client import DIALECT, new_live, prompts_of


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
    join = tree.join(prompt, None)
    grown = TurnGrowth([key], answer, lane, TurnKind.MAIN, ended=True, thinks=False)
    tree.add(turn_id, join, tree.prompt(join, prompt[join.kept_tokens :]), sampled, grown)
    return join


def test_streams_share_buffers_and_stay_what_they_were() -> None:
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
    assert tree.nodes[4].parent_id == 2
    assert tree.num_bytes == 4 * 14


def test_a_known_base_gives_the_same_join_as_a_search_of_everything() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tree = TurnTree()
        for turn_id in range(1, 12):
            base = int(rng.integers(0, turn_id)) or None
            known = tree.stream(base) if base else ids()
            prompt = np.concatenate([known, rng.integers(0, 2, rng.integers(1, 4)).astype(np.int32)])
            join, searched = tree.join(prompt, base), tree.join(prompt, None)
            assert join.kept_tokens == searched.kept_tokens
            grow(tree, turn_id, prompt, np.array([100 + turn_id, *rng.integers(0, 2, 2)], np.int32))


def test_an_answer_is_found_by_what_a_template_can_see() -> None:
    tree = TurnTree()
    call = ToolCall("call_1", "bash", {"b": 1.0, "a": "x"})
    grow(tree, 1, ids(1), ids(2), Message("assistant", "t", "", (call,)))

    def found(message: Message) -> bool:
        return tree.answered(b"k", MessageRun.of([message]), "") is not None

    assert found(Message("assistant", "t", "", (ToolCall("call_1", "bash", {"a": "x", "b": 1}),)))
    assert found(Message("assistant", " t\n", "", (ToolCall("other", "bash", {"a": "x", "b": 1}),)))
    assert not found(Message("assistant", "t", "", (ToolCall("call_1", "bash", {"a": "y", "b": 1}),)))
    assert not found(Message("assistant", "t"))


def test_equal_samples_are_told_apart_by_tool_ids_and_lane() -> None:
    tree = TurnTree()
    for turn_id, (call_id, lane) in enumerate((("one", ""), ("two", ""), ("one", "agent")), start=1):
        grow(tree, turn_id, ids(1), ids(turn_id), Message("assistant", "", "", (ToolCall(call_id, "bash", {}),)), lane)

    def answered(call_id: str, lane: str) -> int | None:
        return tree.answered(
            b"k", MessageRun.of([Message("assistant", "", "", (ToolCall(call_id, "bash", {}),))]), lane
        )

    assert [answered("one", ""), answered("two", ""), answered("one", "agent")] == [1, 2, 3]
    assert answered("three", "") is None  # ambiguous without the id
    assert tree.answers_like(b"k", MessageRun.of([Message("assistant", "", "", (ToolCall("three", "bash", {}),))]))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SUMMARY = "The parser was fixed in reader.py and two of the five tests pass now."
LONG = "a question with enough words in it that most of the prompt is shared with any other like it"


class Talk:
    """A session driven by wire messages; each answer is sampled canonically."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.prompts, self.live, self.number = renderer, prompts_of(renderer), new_live(), 0

    async def turn(
        self, messages: list[dict[str, Any]], answer: str, lane: str = "", end: str = "<|im_end|>", reasoning: str = ""
    ) -> ForkCause | None:
        import orjson

        body = orjson.dumps({"messages": messages, "system": "sys", "max_tokens": 5})
        prepared = await self.prompts.prepare(
            self.live, body, DIALECT, {"x-claude-code-agent-id": lane} if lane else {}
        )
        self.number += 1
        self.kind = prepared.kind
        stop = [self.renderer.tokens.plain.token_to_id(end)] if end else []
        shown = f"<think>\n{reasoning}\n</think>\n\n{answer}" if reasoning else answer
        ids = self.renderer.tokens.plain.encode(shown, add_special_tokens=False).ids
        sampled = np.array([*ids, *stop], np.int32)
        message = Message("assistant", answer, reasoning)
        grown = TurnGrowth(
            prepared.new_keys,
            message,
            lane,
            prepared.kind,
            self.renderer.ended(sampled),
            prepared.thinks or bool(reasoning),
        )
        self.live.tree.add(self.number, prepared.join, prepared.stream, sampled, grown)
        return prepared.fork_cause


async def test_causes(renderer: Renderer) -> None:
    talk, first = Talk(renderer), [user(LONG)]
    assert await talk.turn(first, "one") is ForkCause.ROOT
    assert await talk.turn([*first, said("one"), user("go")], "two") is None
    assert await talk.turn([*first, said("one"), user("other")], "three") is ForkCause.EDIT
    assert await talk.turn([*first, said("changed"), user("go")], "four") is ForkCause.EDIT
    assert await talk.turn(first, "five") is ForkCause.RESTART
    assert await talk.turn([user(LONG)], "six", lane="agent") is ForkCause.SUB_AGENT
    assert await talk.turn([user(LONG), said("six"), user("go")], "seven", lane="agent", end="") is None
    longer = [user(LONG), said("six"), user("go"), said("seven"), user("more")]
    assert await talk.turn(longer, "eight", lane="agent") is ForkCause.STOP


async def test_an_equal_message_that_cannot_stand_is_drift(renderer: Renderer) -> None:
    talk, first = Talk(renderer), [user(LONG)]
    await talk.turn(first, "one ")
    await talk.turn(first, "one\n")
    assert (
        await talk.turn([*first, said("one"), user("go")], "x") is ForkCause.DRIFT
    )  # which of the two it was cannot be told


async def test_dropped_thinking_is_a_fork_of_its_own(renderer: Renderer) -> None:
    talk, first = Talk(renderer), [user(LONG)]
    await talk.turn(first, "one", reasoning="deep")
    thought = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "deep", "signature": "s"}, {"type": "text", "text": "one"}],
    }
    assert await talk.turn([*first, thought, user("next question")], "two") is ForkCause.THINKING


async def test_a_summary_opens_a_conversation_that_goes_on(renderer: Renderer) -> None:
    talk, first = Talk(renderer), [user(LONG)]
    await talk.turn(first, "one")
    question = user("Your task is to create a detailed summary of the conversation so far.")
    assert await talk.turn([*first, said("one"), question], SUMMARY) is None
    assert talk.kind is TurnKind.COMPACTION
    assert await talk.turn([user("This session goes on.\n" + SUMMARY)], "three") is ForkCause.COMPACTION
    assert talk.kind is TurnKind.MAIN


async def test_a_summary_of_all_but_the_last_exchange(renderer: Renderer) -> None:
    """As Claude Code does it: the request leaves out what is kept word for word, and that stands behind the summary afterwards."""
    talk, first = Talk(renderer), [user(LONG)]
    await talk.turn(first, "one")
    kept = [said("one"), user("go")]
    await talk.turn([*first, *kept], "two")
    question = {"type": "text", "text": "Your task is to create a detailed summary of the conversation so far."}
    assert (
        await talk.turn([{"role": "user", "content": [{"type": "text", "text": LONG}, question]}], "short")
        is ForkCause.COMPACTION
    )
    assert await talk.turn([user("It goes on: short"), *kept, said("two"), user("on")], "three") is ForkCause.COMPACTION
    assert await talk.turn([user("Another opening"), *kept], "four") is ForkCause.EDIT


@pytest.mark.parametrize(
    ("text", "kind"), [("fix it", TurnKind.MAIN), ("Generate a short title for this", TurnKind.AUXILIARY)]
)
def test_kinds(text: str, kind: TurnKind) -> None:
    from adapter.conversation import RequestOptions

    assert kind_of(RequestOptions("messages"), "", [MessageRun.of([Message("user", text)])]) is kind


def test_a_prompt_that_nothing_precedes_is_a_root() -> None:
    tree, unit = TurnTree(), MessageRun.of([Message("user", "x")])
    keys = [b"h", extend_key(b"h", unit.key)]
    assert cause_of(tree, AttachPoint(None, 0), 3, "", [unit], keys, False) is ForkCause.ROOT
    assert cause_of(tree, AttachPoint(None, 0), 3, "agent", [unit], keys, False) is ForkCause.SUB_AGENT


def test_what_a_tool_returned_asks_for_nothing() -> None:
    """A file that quotes a request for a title or a summary makes no turn auxiliary, nor a compaction."""
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
