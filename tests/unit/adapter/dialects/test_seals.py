"""A seal is read if this service made it; thinking that another service has sealed is no error and no thinking."""

import base64
from typing import Any

import pytest

from adapter.conversation import Message
from adapter.dialects.responses import ResponsesDialect
from adapter.dialects.responses_stream import reasoning_item


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def read(**fields: Any) -> str:
    item = {"type": "reasoning", "summary": []} | fields
    (message,) = ResponsesDialect().messages([item], 0)
    assert message == Message("assistant", "", message.reasoning)
    return message.reasoning


@pytest.mark.parametrize("thinking", ["", "first look", "é 日本 \U0001f600", "abcd"])
def test_an_own_seal_is_read_with_and_without_the_fields_that_clients_omit(thinking: str) -> None:
    item = reasoning_item(7, thinking)
    assert item["encrypted_content"] == "ratchet:" + encoded(thinking)
    assert read(**item) == read(encrypted_content=item["encrypted_content"]) == thinking


@pytest.mark.parametrize(
    "sealed", ["", "é", "ééé", "?", "a", "====", "ratchet:é", "ratchet:?", "ratchet:" + encoded(b"\x80abc"), 5, {}]
)
def test_what_another_service_has_sealed_is_no_thinking(sealed: Any) -> None:
    assert read(encrypted_content=sealed) == ""
    assert read(encrypted_content=sealed, summary=[{"type": "summary_text", "text": "in short"}]) == "in short"


def test_text_in_base64_without_the_prefix_is_no_seal() -> None:
    sealed = encoded("not ours")
    assert read(encrypted_content=sealed) == read(encrypted_content=sealed, id="rs_7") == ""
    assert read(encrypted_content=sealed, content=[{"type": "reasoning_text", "text": "theirs"}]) == "theirs"
