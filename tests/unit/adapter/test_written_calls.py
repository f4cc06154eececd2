"""The agent gets the calls that the model wrote, or its text; with vLLM's parsers and the families' templates."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapter.conversation import Preamble, RequestOptions, ToolCall, ToolForms
from adapter.output_parser import OutputParser, ParsedOutput
from adapter.prompt.renderer import Renderer
from adapter.vllm_parsers import VllmParsers
from tests.unit.adapter.families import make_renderer

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::SyntaxWarning"
)
STRING = {"type": "string"}
WRITE = {
    "type": "object",
    "properties": {"path": STRING, "content": STRING, "mode": STRING},
    "required": ["path", "content"],
}
EDITS = {
    "type": "object",
    "properties": {
        "edits": {"$ref": "#/$defs/Edits"},
        "limit": {"anyOf": [{"$ref": "#/$defs/Limit"}, {"type": "null"}]},
        "id": {"type": ["string", "integer"]},
        "ratio": {"type": "number"},
        "flag": {"anyOf": [{"type": "boolean"}, STRING]},
    },
    "required": ["edits"],
    "$defs": {"Edits": {"type": "array", "items": {"type": "object"}}, "Limit": {"type": "integer"}},
}
SCALE = {
    "$ref": "#/$defs/Scale",
    "$defs": {"Scale": {"type": "object", "properties": {"factor": {"type": "integer"}}, "required": ["factor"]}},
}
TOOLS: Any = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in (("write", WRITE), ("apply_edits", EDITS), ("scale", SCALE))
)


@dataclass(frozen=True)
class Request:
    """The part of a parsed request that the parsers read."""

    options: RequestOptions
    preamble: Preamble


async def parsed(outputs: OutputParser, text: str, strict: bool = False) -> ParsedOutput:
    forms = ToolForms(strict=frozenset({"write", "apply_edits", "scale"} if strict else ()))
    request: Any = Request(RequestOptions("chat", tool_forms=forms), Preamble.of("", TOOLS))
    return await outputs.parse(text, request, stopped=True)


def outputs_of(renderer: Renderer, tool_parser: str) -> OutputParser:
    parsers = VllmParsers(renderer.model_path, tool_parser, None)
    parsers.load()
    return OutputParser(renderer, parsers)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> OutputParser:
    return outputs_of(make_renderer(tmp_path_factory.mktemp("coder"), "qwen3_coder"), "qwen3_coder")


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> OutputParser:
    return outputs_of(make_renderer(tmp_path_factory.mktemp("hermes"), "qwen2_5"), "hermes")


def call(tool: str, **values: str) -> str:
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={tool}>\n{inner}</function>\n</tool_call>"


def write(content: str) -> str:
    return call("write", path="a.txt", content=content)


@pytest.mark.parametrize(
    "content",
    [
        "A value ends with </parameter> here.\nlast line",
        "A function ends with </function> here.\nlast line",
        "x\n</parameter>\n</function>\n</tool_call>\nlast line",
        "use <parameter=name> to name it",
        "use <parameter=mode> to name it",
        "Example:\n<parameter=mode>\nx\n</parameter>\nend",
        "Example:\n<parameter=mode>\nx\n</parameter>",
        "Example:\n<parameter=other>\nx",
        "twice\n<parameter=path>\nb.txt",
        "</parameter>",
        "</function>all",
        "spaced </parameter > mark",
        "spaced < / parameter > mark",
        "spaced < parameter = mode> mark",
        "a\n</parameter>\n<parameter=content>\nb",
        f"an example:\n{call('write', path='b.txt', content='x')}\nend",
    ],
)
async def test_a_call_that_the_parser_would_change_is_text(coder: OutputParser, content: str) -> None:
    output = await parsed(coder, write(content))
    assert (output.message.tool_calls, output.message.text) == ((), write(content))
    assert output.finish == "stop" and output.unread in ("changed", "arguments")


@pytest.mark.parametrize(
    "content",
    [
        "plain",
        "  lead\n\n\nlast \n\n",
        "\r\n\ttab\r",
        "a <tool_call> b </tool_call> c",
        "</tool_call>" * 6,
        "a\n<function=write>\nb",
        "{x} \"q\" '\\n' é \\u00e9",
        "",
        "   ",
        "\n",
        "0071",
        "null",
        '"quoted"',
        "&lt;a&gt; &amp;",
        "<think>a</think>",
        "a </PARAMETER> b <function=c> d",
    ],
)
async def test_a_value_with_marks_that_end_nothing_is_whole(coder: OutputParser, content: str) -> None:
    output = await parsed(coder, "Hm.\n\n" + write(content))
    assert [one.arguments for one in output.message.tool_calls] == [{"path": "a.txt", "content": content}]
    assert output.unread is None


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n<parameter=content>\nx\n</parameter>\n</function>\n"
        "</tool_call>",
        "<function=write>\n<parameter=path>\na.txt</parameter>\n<parameter=content>x</parameter></function>",
        "\n " + write("x") + "\nDone.",
        write("x") + "\n</tool_call>",
    ],
    ids=["a missing end mark", "no frame", "text behind", "an end mark too many"],
)
async def test_differences_that_change_nothing_are_taken(coder: OutputParser, text: str) -> None:
    output = await parsed(coder, text)
    assert [one.arguments for one in output.message.tool_calls] == [{"path": "a.txt", "content": "x"}]


async def test_the_calls_before_one_that_is_changed_are_kept(coder: OutputParser) -> None:
    output = await parsed(coder, write("1") + "\n" + write("a </parameter> b"))
    assert [one.arguments["content"] for one in output.message.tool_calls] == ["1"]
    assert output.unread == "changed"


@pytest.mark.parametrize("strict", [False, True])
async def test_arguments_of_a_schema_that_is_a_reference(coder: OutputParser, strict: bool) -> None:
    """It has its required arguments and their types by reference, too."""
    (found,) = (await parsed(coder, call("scale", factor="2"), strict)).message.tool_calls
    assert dict(found.arguments) == {"factor": 2}
    assert (await parsed(coder, call("scale", unit="m"), strict)).unread == "arguments"


@pytest.mark.parametrize("strict", [False, True])
async def test_references_are_resolved_and_no_digit_is_lost(coder: OutputParser, strict: bool) -> None:
    values = {"edits": '[{"old": "a", "new": "b"}]', "limit": "10", "id": "0071", "ratio": "0.10", "flag": "1"}
    (found,) = (await parsed(coder, call("apply_edits", **values), strict)).message.tool_calls
    expected = {"edits": [{"old": "a", "new": "b"}], "limit": 10, "id": "0071", "ratio": 0.1, "flag": "1"}
    assert dict(found.arguments) == expected and type(found.arguments["flag"]) is str
    (found,) = (await parsed(coder, call("apply_edits", edits="[]", limit="None"), strict)).message.tool_calls
    assert dict(found.arguments) == {"edits": [], "limit": None}


def json_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("arguments", "unread"),
    [
        ('{"path": "a",\n "content": "caf\\u00e9", "n": 1e2}', None),
        ('{"path": "a", "content": "</tool_call>"}', "no_parser"),
        ('{"path": "a", "content": "x", "path": "b"}', "changed"),
        ('{"path": "a", "content": "x", "n": 0.12345678901234567891}', "changed"),
        ('{"path": "a", "content": "x", "n": 123456789012345678901234}', "arguments"),
        ('{"path": "a", "content": 0071}', "no_parser"),
        ('{"path": "a"}', "arguments"),
    ],
)
async def test_json_is_kept_as_it_was_written(hermes: OutputParser, arguments: str, unread: str | None) -> None:
    output = await parsed(hermes, json_call(arguments))
    calls = [dict(one.arguments) for one in output.message.tool_calls]
    assert calls == ([] if unread else [json.loads(arguments)]) and output.unread == unread


async def test_a_tool_that_was_not_offered(hermes: OutputParser) -> None:
    output = await parsed(hermes, json_call("{}").replace("write", "delete"))
    assert (output.message.tool_calls, output.unread) == ((), "not_offered")


async def test_text_with_a_mark_and_without_one(hermes: OutputParser) -> None:
    assert (await parsed(hermes, "I say <tool_call>")).unread == "no_parser"
    assert (await parsed(hermes, "I say {nothing}")).unread is None


VALUES: list[dict[str, Any]] = [
    {"path": "a b.txt", "content": "if x < 1:\n    y = '\"'\n"},
    {"path": "", "content": "\n  foo\n\n"},
    {"path": "5", "content": "true", "mode": "null"},
    {"path": "é \\u00e9", "content": '{x} ["q"] {"a": 1'},
]


@pytest.mark.parametrize(
    ("family", "tool_parser"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "qwen3_json"),
        ("qwen3_coder", "qwen3_xml"),
        ("qwen3_5_think", "qwen3_coder"),
        ("nemotron_3_nano", "qwen3_coder"),
        ("devstral", "mistral"),
        ("glm4moe", "glm45"),
        ("deepseekv3", "deepseek_v3"),
        ("minimax_m2", "minimax_m2"),
        ("kimi_k2", "kimi_k2"),
    ],
)
async def test_what_a_template_writes_is_delivered(tmp_path: Path, family: str, tool_parser: str) -> None:
    """Also by a template whose calls have ids, which cannot be compared."""
    renderer = make_renderer(tmp_path, family)
    outputs = outputs_of(renderer, tool_parser)
    assert outputs.compares_calls is (family != "kimi_k2")
    for values in VALUES:
        text = outputs.written.text_of([ToolCall("c", "write", values)])
        found = (await parsed(outputs, "Hm." + text)).message.tool_calls
        assert [(one.name, dict(one.arguments)) for one in found] == [("write", values)], text


async def test_the_calls_of_another_models_parser_are_delivered_as_before(tmp_path: Path) -> None:
    outputs = outputs_of(make_renderer(tmp_path, "qwen2_5"), "qwen3_coder")
    assert not outputs.compares_calls and len((await parsed(outputs, write("x"))).message.tool_calls) == 1
