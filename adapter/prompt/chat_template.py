"""The model's chat template: messages → text, with every added token under an alias that no content can spell.

This is the only file that knows Jinja, and what the templates of different models accept.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from adapter.conversation import Message, Tool, ToolCall
from ratchet.errors import ConfigError
from ratchet.model_directory import read_chat_template, read_model_json

if TYPE_CHECKING:
    from jinja2 import Template


class TemplateRefusedError(ValueError):
    """The chat template cannot render this history; the message contains the template's error."""


def _named_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


class ChatTemplate:
    """A compiled chat template.

    `kwargs` are the run's template variables; `preserve_thinking` is set if the template has it. `digest` identifies
    the template's text and its variables. `literals`: the string literals in the template. `marks`: those that are no
    plain words, as the template may look for them in a message's text. `reads_clock`: its text changes with the time.
    `shows_reasoning`: whether it shows an answer's reasoning anywhere. `shows_call_ids`: whether it shows the call's id
    with a tool result.

    Templates do not expect four things that agents do; they are converted here for every dialect:
    - Agents send arguments as an object, and an empty text. A template that does not show a call in this form gets the
      arguments as JSON text, the text as null, or both.
    - Ids of calls are the agents' own. A template that shows a call's id in place of its name, as Kimi K2's does, gets
      ids that have it: `functions.NAME:0`, counted over the conversation.
    - A system message after the first message becomes a user message if the template refuses it or leaves it out.
    - A user's text beside a tool result is appended to that result if it would make the template drop earlier thinking.
    """

    def __init__(self, model_path: Path, alias: Mapping[str, str], kwargs: Mapping[str, Any]) -> None:
        source = _source(model_path)
        self.kwargs = ({"preserve_thinking": True} if re.search(r"\bpreserve_thinking\b", source) else {}) | dict(
            kwargs
        )
        self.digest = sha256(source.encode() + orjson.dumps(self.kwargs, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
        self.reads_clock = "strftime_now" in source
        self.literals = tuple(dict.fromkeys(re.findall(r"""['"]([^'"\n\\]{2,40})['"]""", _renamed(source, alias))))
        self._variables = _special_variables(model_path, alias)
        compiled = _compile(_renamed(source, alias), model_path)
        self.marks = _marks(compiled, _renamed(source, alias))
        self._compiled: Callable[..., str] = compiled.render
        self._late_system = True
        self._appends_to_results = False
        self._names_in_ids = self._null_content = self._text_arguments = False
        self._require_question(model_path)
        self._find_call_form()
        late = [Message("user", "q"), Message("assistant", "a"), Message("system", "zxqj")]
        self._late_system = self._shows("zxqj", late)
        self._appends_to_results = self._drops_thinking_beside_tools()
        self.shows_reasoning = self._shows_reasoning()
        self.shows_call_ids = self._shows_call_ids()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation_prompt: bool = False) -> str:
        """Render messages and tools. Raises TemplateRefusedError."""
        try:
            return self._compiled(
                messages=self._converted(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
                **self.kwargs,
            )
        except Exception as error:  # a template is a program of the model's authors, and may raise anything
            raise TemplateRefusedError(f"the model's chat template cannot render this conversation: {error}") from error

    def _converted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        converted: list[dict[str, Any]] = []
        named_ids: dict[str, str] = {}
        numbers = count()
        for message in messages:
            one = message.for_template()
            for call in one.get("tool_calls", ()):
                if self._names_in_ids:
                    named = _named_id(call["function"]["name"], next(numbers))
                    named_ids[call["id"]] = named
                    call["id"] = named
                if self._text_arguments:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if "tool_call_id" in one:
                one["tool_call_id"] = named_ids.get(one["tool_call_id"], one["tool_call_id"])
            if self._null_content and message.tool_calls and not message.text:
                one["content"] = None
            after_tool = bool(converted) and converted[-1]["role"] == "tool"
            late = message.role == "system" and bool(converted) and not self._late_system
            if late:
                one["role"] = "user"
            if self._appends_to_results and after_tool and (late or message.beside_tool):
                converted[-1]["content"] += "\n" + one["content"]
            else:
                converted.append(one)
        return converted

    def _require_question(self, model_path: Path) -> None:
        """Raise ConfigError if the template does not even show a question."""
        try:
            reason = "" if "zxqj" in self.render([Message("user", "zxqj")]) else "its text is not in the prompt"
        except TemplateRefusedError as error:
            reason = str(error.__cause__)
        if reason:
            raise ConfigError(f"the chat template of {model_path} shows no question: {reason}; give the model's own")

    def _shows(self, word: str, messages: Sequence[Message]) -> bool:
        """Return whether the template takes these messages and the word is in its text."""
        try:
            return word in self.render(messages)
        except TemplateRefusedError:
            return False

    def _shows_call(self) -> bool:
        """Return whether the template shows a tool call of an answer without text."""
        call = ToolCall("zxqc", "zxqj", {"a": "b"})
        history = [Message("user", "q"), Message("assistant", "", tool_calls=(call,))]
        if not self._names_in_ids:  # a result, too, has the call's id
            history.append(Message("tool", "r", tool_call_id=call.id))
        return self._shows(call.name, history)

    def _find_call_form(self) -> None:
        """Set the form of tool calls that the template shows; the usual one if it shows none."""
        for names_in_ids, null_content, text_arguments in [*product((False, True), repeat=3), (False, False, False)]:
            self._names_in_ids = names_in_ids
            self._text_arguments = text_arguments
            self._null_content = null_content
            if self._shows_call():
                return

    def _shows_call_ids(self) -> bool:
        call = ToolCall("zxqjcid01", "f", {})
        answered = Message("assistant", "", tool_calls=(call,)), Message("tool", "r", tool_call_id=call.id)
        shown = _named_id(call.name, 0) if self._names_in_ids else call.id
        return self._shows(shown, [Message("user", "q"), *answered])

    def _shows_reasoning(self) -> bool:
        call = ToolCall("zxqc", "f", {})
        followers: list[list[Message]] = [[Message("tool", "r", tool_call_id=call.id)], [Message("user", "u")], []]
        answers = [Message("assistant", "a", "zxqj", calls) for calls in ((call,), ())]
        return any(
            self._shows("zxqj", [Message("user", "q"), answer, *follower])
            for follower in followers
            for answer in answers
        )

    def _drops_thinking_beside_tools(self) -> bool:
        history = [Message("user", "q"), Message("assistant", "a", "zxqj"), Message("tool", "r")]
        try:
            kept = "zxqj" in self.render(history)
            return kept and "zxqj" not in self.render([*history, Message("user", "u", beside_tool=True)])
        except TemplateRefusedError:
            return False


def _source(model_path: Path) -> str:
    template = read_chat_template(model_path)
    if template is None:
        raise ConfigError(
            f"model directory {model_path} has no chat template (chat_template.jinja); use an instruction-tuned model"
        )
    return template


def _renamed(text: str, alias: Mapping[str, str]) -> str:
    if not alias:
        return text
    names = sorted(alias, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, names)), lambda found: alias[found[0]], text)


def _compile(template: str, model_path: Path) -> "Template":
    """Compile in Hugging Face's Jinja environment, sandboxed. Raises ConfigError for an error of syntax."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled: Template = _compile_jinja_template(template)
    except TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"the chat template of {model_path} cannot be compiled: {error}{line}") from error
    return compiled


def _marks(compiled: "Template", source: str) -> tuple[str, ...]:
    """Return the string literals of a template that are no plain words, such as `</think>`, stripped."""
    strings = [value[1:-1] for _, kind, value in compiled.environment.lex(source) if kind == "string"]
    texts = {one.encode("ascii", "backslashreplace").decode("unicode-escape").strip() for one in strings}
    return tuple(sorted(one for one in texts if re.search(r"\W", one)))


def _special_variables(model_path: Path, alias: Mapping[str, str]) -> dict[str, str]:
    """`bos_token` and the like, which templates may use as variables."""
    values = {}
    for name, value in read_model_json(model_path, "tokenizer_config.json", required=False).items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            values[name] = alias.get(text, text)
    return values
