"""Images and files as text: the size comes from the file's header; nothing else about a file can be wrong."""

from typing import Any

import pytest

from adapter.conversation import Message
from adapter.dialects.base import Dialect, InvalidRequestError
from adapter.dialects.chat import ChatDialect
from adapter.dialects.media import omitted_image
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from tests.unit.adapter.client import picture


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_size_is_read_from_the_header(kind: str) -> None:
    data = picture(kind, (31, 7))
    assert omitted_image(data).text == omitted_image(f"data:image/x;base64,{data}").text == "[image, 31x7, omitted]"


@pytest.mark.parametrize(
    "data", [None, 3, "", "https://example.org/a.png", "%%%", "AAAA", picture()[:20], picture("BMP"), "data:image/png"]
)
def test_an_image_without_a_readable_header_has_no_size(data: Any) -> None:
    assert omitted_image(data).text == "[image, omitted]"


def test_a_large_image_is_not_decoded() -> None:
    """Only the beginning is read: the rest may be missing."""
    data = picture("PNG", (3000, 2000))
    assert omitted_image(data[:100] + "A" * 40_000_000).text == "[image, 3000x2000, omitted]"


SOURCE = {"type": "base64", "media_type": "image/png", "data": picture()}
URL = f"data:image/png;base64,{picture()}"
SEEN = "[image, 640x480, omitted]"
PARTS: list[tuple[Dialect, dict[str, Any], str, int]] = [
    (MessagesDialect(), {"type": "image", "source": SOURCE}, SEEN, 1),
    (MessagesDialect(), {"type": "image", "source": {"type": "file", "file_id": "f"}}, "[image, omitted]", 1),
    (
        MessagesDialect(),
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
        "[document, application/pdf, omitted]",
        1,
    ),
    (MessagesDialect(), {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}, "T\nwords", 0),
    (
        MessagesDialect(),
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "x"}]},
        "T\nS\nx",
        0,
    ),
    (MessagesDialect(), {"type": "tool_reference", "tool_name": "grep"}, "[tool grep]", 0),
    (ChatDialect(), {"type": "image_url", "image_url": {"url": URL}}, SEEN, 1),
    (ChatDialect(), {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "[audio, wav, omitted]", 1),
    (ChatDialect(), {"type": "file", "file": {"filename": "a.pdf"}}, "[file, a.pdf, omitted]", 1),
    (ResponsesDialect(), {"type": "input_image", "image_url": URL, "detail": "auto"}, SEEN, 1),
    (ResponsesDialect(), {"type": "input_file", "filename": "a.pdf"}, "[file, a.pdf, omitted]", 1),
]


def results(dialect: Dialect, part: dict[str, Any]) -> list[Message]:
    """The part in a user's message, and in a tool's result."""
    match dialect.name:
        case "messages":
            result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": [part]}
            asked = dialect.messages([{"role": "user", "content": [part]}], 0)
            return asked + dialect.messages([{"role": "user", "content": [result]}], 0)
        case "chat":
            result = {"role": "tool", "tool_call_id": "c", "content": [part]}
            return dialect.messages([{"role": "user", "content": [part]}, result], 0)
    result = {"type": "function_call_output", "call_id": "c", "output": [part]}
    custom = {"type": "custom_tool_call_output", "call_id": "c", "output": [part]}
    return dialect.messages([{"role": "user", "content": [part]}, result, custom], 0)


@pytest.mark.parametrize(("dialect", "part", "text", "number"), PARTS)
def test_each_part_is_text_for_the_model(dialect: Dialect, part: dict[str, Any], text: str, number: int) -> None:
    found = results(dialect, part)
    assert {(message.text, message.num_omitted) for message in found} == {(text, number)}


@pytest.mark.parametrize("dialect", [MessagesDialect(), ChatDialect(), ResponsesDialect()], ids=lambda one: one.name)
def test_a_part_of_an_unknown_type_is_refused(dialect: Dialect) -> None:
    with pytest.raises(InvalidRequestError, match="hologram"):
        results(dialect, {"type": "hologram"})
