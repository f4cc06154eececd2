"""A history's text as the sum of its parts: the opening, each run of messages, each answer, each rendered on its own.

Why here: a turn must cost its new text and not its history, and no model's template may be written into code for that.
Called by: `rendering.py`.

Each part is rendered by the model's own template between short stubs, which are then peeled off; the same render shows whether the
part makes the template drop earlier thinking. Whether a template is the sum of its parts is tried out at start, on a few hundred
histories (`check`); one that is not (tools before the last question, a clock, text after everything) is rendered in full each time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from adapter.conversation import Message, MessageRun, Preamble, Tool, ToolCall
from adapter.prompt.chat_template import ChatTemplate, TemplateRefusedError

_USER, _TOOL, _ANSWER = Message("user", "zqxu"), Message("tool", "zqxt"), Message("assistant", "zqxa")
_THOUGHT = Message("assistant", "zqxa", "zqxr")
_NUM_PROBES = 160


class NotSegmentableError(Exception):
    """The template cannot be rendered in parts; the message says what gave it away."""


@dataclass(frozen=True, slots=True)
class SegmentedHistory:
    """The parts of a history. `kept[i]`: the template shows the thinking of unit i, if it is an answer that has any."""

    texts: list[str]
    kept: list[bool]


class TemplateSegments:
    def __init__(self, template: ChatTemplate) -> None:
        """Raises NotLocalError."""
        self._template = template
        self._user = self._render([_USER])
        self.generation = _without_head(template.render([_USER], generation_prompt=True), self._user)
        self.end = self._after_answer([_USER, _ANSWER])
        self._next_user = _without_head(self._after_answer([_USER, _ANSWER, _USER]), self.end)
        self._next_tool = self._next_after_tool()
        self._shown = _without_tail(self._render([_USER, _THOUGHT, _TOOL]), self._next_tool) if self._next_tool else ""
        self._dropped = _without_tail(self._render([_USER, _THOUGHT, _USER]), self._next_user)
        self.drops_thinking = bool(self._next_tool) and self._shown != self._dropped

    # ------------------------------------------------------------ parts

    def opening(self, head: Preamble, unit: MessageRun) -> str:
        """System text, tools and everything before the first answer."""
        return self._template.render([*head.messages(), *unit.messages], head.tools)

    def others(self, unit: MessageRun) -> tuple[str, bool]:
        """What stands between two answers, and whether it makes the template drop the thinking before it."""
        text = self._render([_USER, _THOUGHT, *unit.messages])
        if self.drops_thinking and text.startswith(self._shown):
            return text[len(self._shown) :], False
        return _without_head(text, self._dropped), self.drops_thinking

    def answer(self, message: Message, kept: bool) -> str:
        """The generation prompt, the answer and its end, with its thinking or as it stands once that is dropped."""
        follower, tail = (_TOOL, self._next_tool) if kept and self.drops_thinking else (_USER, self._next_user)
        return _without_head(_without_tail(self._render([_USER, message, follower]), tail), self._user)

    def thinks(self, message: Message) -> bool:
        """Whether a later question changes how this answer stands."""
        return self.drops_thinking and self.answer(message, True) != self.answer(message, False)

    def lay(self, head: Preamble, units: Sequence[MessageRun]) -> SegmentedHistory:
        """A whole history. Raises NotLocalError where its first run holds no question: what is dropped then is the template's secret."""
        texts, last = [self.opening(head, units[0])], 0
        if self.drops_thinking and not self.others(units[0])[1]:
            raise NotSegmentableError("the conversation opens without a question")
        for at, unit in enumerate(units[1:], start=1):
            text, drops = ("", False) if unit.assistant else self.others(unit)
            texts.append(text)
            last = at if drops else last
        kept = [at > last for at in range(len(units))]
        for at, unit in enumerate(units):
            if unit.assistant:
                texts[at] = self.answer(unit.messages[0], kept[at])
        return SegmentedHistory(texts, kept)

    # ------------------------------------------------------------ stubs

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages)
        except TemplateRefusedError as error:
            raise NotSegmentableError(str(error)) from error

    def _after_answer(self, messages: Sequence[Message]) -> str:
        _, found, rest = self._render(messages).rpartition(_ANSWER.text)
        if not found:
            raise NotSegmentableError("an answer's text is not rendered as it is")
        return rest

    def _next_after_tool(self) -> str:
        try:
            return _without_head(self._after_answer([_USER, _ANSWER, _TOOL]), self.end)
        except NotSegmentableError:
            return ""  # a template without tools

    # ------------------------------------------------------------ the check at start

    def check(self) -> Iterator[str]:
        """Full texts of histories that were equal to the sum of their parts. Raises NotLocalError at the first that is not."""
        if self._template.reads_clock:
            raise NotSegmentableError("it reads the clock")
        num_equal = 0
        for head, units in _probes(self._template.literals):
            messages = [*head.messages(), *(message for unit in units for message in unit.messages)]
            try:
                full = self._template.render(messages, head.tools, generation_prompt=True)
            except TemplateRefusedError:
                continue
            if full != "".join(self.lay(head, units).texts) + self.generation:
                raise NotSegmentableError("a history is not the sum of its parts")
            num_equal += 1
            yield full
        if num_equal < _NUM_PROBES // 4:
            raise NotSegmentableError("it refuses most ways in which agents talk")


def _without_head(text: str, head: str) -> str:
    if not text.startswith(head):
        raise NotSegmentableError("earlier text changes with what follows")
    return text[len(head) :]


def _without_tail(text: str, tail: str) -> str:
    if not text.endswith(tail):
        raise NotSegmentableError("later text changes with what stands before")
    return text[: len(text) - len(tail)]


def _probes(literals: Sequence[str]) -> Iterator[tuple[Preamble, list[MessageRun]]]:
    """Histories in all shapes that agents send; the template's own words stand among the texts, since templates look for them."""
    rng = random.Random(0)
    tools: list[Tool] = [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
        for name in ("one", "two")
    ]
    words = [
        "plain",
        "",
        " lead",
        "trail \n",
        "two\n\nlines",
        *(one for one in literals if "\x01" not in one and "\x02" not in one),
    ]

    def text() -> str:
        return "".join(rng.choices(words, k=rng.choice((1, 1, 2, 3))))

    for _ in range(_NUM_PROBES):
        opening = [Message("user", text() or "q") for _ in range(rng.choice((1, 1, 1, 2)))]
        units = [MessageRun.of(opening)]
        for _ in range(rng.randrange(4)):
            units += _exchange(rng, text)
        yield Preamble.of(rng.choice(["", "system", "sys\ntem "]), tools[: rng.randrange(3)]), units


def _exchange(rng: random.Random, text: Callable[[], str]) -> list[MessageRun]:
    """An answer and what follows it: a question, or results with or without words beside them."""
    arguments = {"path": text(), "n": rng.randrange(9), "deep": {"list": [1, None, True]}}
    calls = tuple(
        ToolCall(f"call{at:05}", rng.choice(("one", "two")), arguments) for at in range(rng.choice((0, 0, 1, 1, 2)))
    )
    answer = Message("assistant", text(), rng.choice(("", "", "thought", "deep\n\nthought")), calls)
    others = [Message("tool", text(), tool_call_id=call.id) for call in calls]
    if others and rng.random() < 0.3:
        others.append(Message("user", text() or "note", beside_tool=True))
    if not others or rng.random() < 0.2:
        others.append(Message(rng.choice(("user", "user", "system")), text() or "next"))
    return [MessageRun.of([answer]), MessageRun.of(others)]
