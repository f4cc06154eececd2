"""A history's text as the sum of segments: the opening, each run of messages, each answer, each rendered on its own.

This makes a turn cost its new text and not its history, for templates of any model. A segment is rendered by the
model's own template between short stub messages, whose text is then removed; the same render shows whether the segment
makes the template drop earlier thinking. At start, `check` tries 160 histories. A template for which the sum
differs (tools before the last question, a clock, text after everything) is rendered in full for each request.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from adapter.conversation import Message, MessageRun, Preamble, ToolCall, tool_of
from adapter.prompt.chat_template import ChatTemplate, TemplateRefusedError

_USER = Message("user", "zqxu")
_TOOL = Message("tool", "zqxt")
_ANSWER = Message("assistant", "zqxa")
_THOUGHT = Message("assistant", "zqxa", "zqxr")
_NUM_PROBES = 160
_MEMO_SIZE = 256
_MEMO_CHARS = 20_000


class NotSegmentableError(Exception):
    """The template cannot be rendered in segments; the message is the reason."""


class BetweenAnswers(NamedTuple):
    """The text of a run of other roles. `drops_thinking`: the template then leaves earlier thinking out."""

    text: str
    drops_thinking: bool


@dataclass(frozen=True, slots=True)
class SegmentedHistory:
    """One text per run. kept[i]: the template shows the thinking of run i, if it is an answer with thinking.

    `drops`: because of these runs, the template drops the thinking before them.
    """

    texts: list[str]
    kept: list[bool]
    drops: bool


class ProbeHistory(NamedTuple):
    preamble: Preamble
    runs: list[MessageRun]


class TemplateSegments:
    """The segments of one template.

    `generation`: the generation prompt. `end`: the text behind an answer. `drops_thinking`: a later question makes the
    template leave the thinking of earlier answers out.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Render the stubs. Raises NotSegmentableError if their text cannot be separated."""
        self._template = template
        # One turn asks for the same segment several times, and a history may repeat short ones thousands of times.
        self._memo_between = lru_cache(_MEMO_SIZE)(self._between_answers)
        self._memo_answer = lru_cache(_MEMO_SIZE)(self._answer)
        self._user = self._render([_USER])
        self.generation = _without_prefix(template.render([_USER], generation_prompt=True), self._user)
        self.end = self._after_answer([_USER, _ANSWER])
        self._next_user = _without_prefix(self._after_answer([_USER, _ANSWER, _USER]), self.end)
        self._next_tool = self._next_after_tool()
        self._with_thinking = ""
        if self._next_tool:
            self._with_thinking = _without_suffix(self._render([_USER, _THOUGHT, _TOOL]), self._next_tool)
        self._without_thinking = _without_suffix(self._render([_USER, _THOUGHT, _USER]), self._next_user)
        self.drops_thinking = bool(self._next_tool) and self._with_thinking != self._without_thinking
        self._changes_plain_answers = self.drops_thinking and self._finds_changed_plain_answer()

    def opening(self, preamble: Preamble, run: MessageRun) -> str:
        """Return system text, tools and everything before the first answer."""
        return self._template.render(preamble.messages([run]), preamble.tools)

    def between_answers(self, run: MessageRun) -> BetweenAnswers:
        is_short = sum(len(message.text) for message in run.messages) < _MEMO_CHARS
        return self._memo_between(run.messages) if is_short else self._between_answers(run.messages)

    def _between_answers(self, messages: tuple[Message, ...]) -> BetweenAnswers:
        text = self._render([_USER, _THOUGHT, *messages])
        if self.drops_thinking and text.startswith(self._with_thinking):
            return BetweenAnswers(text[len(self._with_thinking) :], False)
        return BetweenAnswers(_without_prefix(text, self._without_thinking), self.drops_thinking)

    def answer(self, message: Message, kept: bool) -> str:
        """Return generation prompt, answer and end. `kept`: with its thinking, else as the template shows it."""
        is_short = not message.tool_calls and len(message.text) + len(message.reasoning) < _MEMO_CHARS
        return self._memo_answer(message, kept) if is_short else self._answer(message, kept)

    def _answer(self, message: Message, kept: bool) -> str:
        keeps = kept and self.drops_thinking
        follower = _TOOL if keeps else _USER
        suffix = self._next_tool if keeps else self._next_user
        return _without_prefix(_without_suffix(self._render([_USER, message, follower]), suffix), self._user)

    def thinks(self, message: Message) -> bool:
        """Return whether a later question changes the text of this answer."""
        if not self.drops_thinking or (self._is_plain(message) and not self._changes_plain_answers):
            return False
        return self.answer(message, True) != self.answer(message, False)

    def _is_plain(self, message: Message) -> bool:
        """Return whether a message has no thinking, nor a mark in its text that the template may take for thinking."""
        return not message.reasoning and not any(mark in message.text for mark in self._template.marks)

    def _finds_changed_plain_answer(self) -> bool:
        """Return whether a later question may change an answer without thinking: tried once, not with every answer."""
        calls = tuple(ToolCall(f"zxqc0000{at}", "zqxf", {"a": "b"}) for at in range(2))
        texts = (_ANSWER.text, "", f" \n {_ANSWER.text} \n ")
        plain = [Message("assistant", text, tool_calls=calls[:num]) for text in texts for num in range(3)]
        try:
            return any(self._answer(one, True) != self._answer(one, False) for one in plain)
        except NotSegmentableError:
            return True

    def render_history(self, preamble: Preamble, runs: Sequence[MessageRun]) -> SegmentedHistory:
        """Return one text per run.

        Raises TemplateRefusedError, and NotSegmentableError, also if the template drops thinking and the first run has
        no question: which thinking it drops is then unknown.
        """
        opening = self.opening(preamble, runs[0])
        if self.drops_thinking and not self.between_answers(runs[0]).drops_thinking:
            raise NotSegmentableError("the conversation opens without a question")
        behind = self.render_behind(runs[1:])
        return SegmentedHistory([opening, *behind.texts], [False, *behind.kept], behind.drops)

    def render_behind(self, runs: Sequence[MessageRun]) -> SegmentedHistory:
        """Return one text per run behind an opening or an answer. Raises NotSegmentableError."""
        others = [None if run.assistant else self.between_answers(run) for run in runs]
        last_drop = max((at for at, one in enumerate(others) if one is not None and one.drops_thinking), default=-1)
        kept = [at > last_drop for at in range(len(runs))]
        texts = [
            self.answer(run.messages[0], is_kept) if other is None else other.text
            for run, other, is_kept in zip(runs, others, kept, strict=True)
        ]
        return SegmentedHistory(texts, kept, last_drop >= 0)

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
            return _without_prefix(self._after_answer([_USER, _ANSWER, _TOOL]), self.end)
        except NotSegmentableError:
            return ""  # a template without tools

    def check(self) -> Iterator[str]:
        """Yield full texts that equal the sum of their segments. Raises NotSegmentableError at one that does not."""
        if self._template.reads_clock:
            raise NotSegmentableError("it reads the clock")
        num_equal = 0
        for preamble, runs in _probes(self._template.literals):
            try:
                full = self._template.render(preamble.messages(runs), preamble.tools, generation_prompt=True)
            except TemplateRefusedError:
                continue
            if full != "".join(self.render_history(preamble, runs).texts) + self.generation:
                raise NotSegmentableError("a history is not the sum of its segments")
            num_equal += 1
            yield full
        if num_equal < _NUM_PROBES // 4:
            raise NotSegmentableError("it refuses most of the histories that agents send")


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise NotSegmentableError("earlier text changes with what follows")
    return text[len(prefix) :]


def _without_suffix(text: str, suffix: str) -> str:
    if not text.endswith(suffix):
        raise NotSegmentableError("later text changes with what stands before")
    return text[: len(text) - len(suffix)]


def _probes(literals: Sequence[str]) -> Iterator[ProbeHistory]:
    """Histories in all shapes that agents send, with the template's own literals, which templates search for."""
    rng = random.Random(0)
    tools = [tool_of(name, "d") for name in ("one", "two")]
    words = ["plain", "", " lead", "trail \n", "two\n\nlines"]
    words += [one for one in literals if "\x01" not in one and "\x02" not in one]

    def text() -> str:
        return "".join(rng.choices(words, k=rng.choice((1, 1, 2, 3))))

    for _ in range(_NUM_PROBES):
        opening = [Message("user", text() or "q") for _ in range(rng.choice((1, 1, 1, 2)))]
        runs = [MessageRun.of(opening)]
        for _ in range(rng.randrange(4)):
            runs += _exchange(rng, text)
        yield ProbeHistory(Preamble.of(rng.choice(["", "system", "sys\ntem "]), tools[: rng.randrange(3)]), runs)


def _exchange(rng: random.Random, text: Callable[[], str]) -> list[MessageRun]:
    """An answer and what follows it: a question, or tool results with or without a user's text beside them."""
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
