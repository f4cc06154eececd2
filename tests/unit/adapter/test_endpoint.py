"""Requests to an endpoint, the content of its answers, and those of its failures that are waited for."""

import json
from typing import Any

import pytest

from activities.harnesses.cli_exits import exit_of_error
from adapter.conversation import Message, MessageRun, Preamble, RequestOptions, ToolCall, ToolChoice
from adapter.endpoint import (
    EndpointClient,
    EndpointContextError,
    EndpointRejectedError,
    EndpointUnavailableError,
    check_endpoint,
)
from adapter.prompt.request_parser import ParsedRequest
from adapter.replies import classify
from adapter.turns.forwarder import chat_request
from ratchet.config_sections import EndpointConfig
from ratchet.errors import ConfigError
from ratchet.types import AgentExit, JsonObject
from tests.standins.chat_engine import DROP, Answer, ChatEngine, calls, completion, refuses, says

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
REQUEST: JsonObject = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def endpoint(port: int, **more: Any) -> EndpointConfig:
    return EndpointConfig(url=f"http://127.0.0.1:{port}/v1/", model="big", **more)


async def ask(*answers: Answer, **more: Any) -> Any:
    """Ask a server that gives these answers, and return the answer, or the error, and the requests that it got."""
    with ChatEngine(answers) as server:
        client = EndpointClient(endpoint(server.port, **more))
        try:
            return await client.complete(REQUEST), server.requests
        except Exception as error:
            return error, server.requests
        finally:
            await client.close()


def parsed(*messages: Message, system: str = "", tools: Any = (), **options: Any) -> ParsedRequest:
    runs = [MessageRun.of([message]) for message in messages]
    return ParsedRequest(Preamble.of(system, tools), RequestOptions("chat", **options), 0, runs, [])


def test_a_conversation_becomes_chat_completions() -> None:
    call = ToolCall("call_1", "bash", {"command": "ls", "n": 3})
    request = parsed(
        Message("user", "fix it"),
        Message("assistant", "", "think", (call,)),
        Message("tool", "a.py", tool_call_id="call_1"),
        system="be brief",
        tools=[TOOL],
        stop_sequences=("a", "b", "c", "d", "e"),
        parallel_calls=False,
    )
    found = json.loads(json.dumps(chat_request(request, 0.5, 100)))
    assert [one["role"] for one in found["messages"]] == ["system", "user", "assistant", "tool"]
    assert json.loads(found["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls", "n": 3}
    assert found["messages"][2]["reasoning_content"] == "think"
    assert found["messages"][3]["tool_call_id"] == found["messages"][2]["tool_calls"][0]["id"]
    assert (found["temperature"], found["max_tokens"], found["tools"]) == (0.5, 100, [TOOL])
    assert found["stop"] == ["a", "b", "c", "d"] and found["parallel_tool_calls"] is False
    assert "tool_choice" not in found and "response_format" not in found


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice(required=True), "required"),
        (ToolChoice(frozenset()), "none"),
        (ToolChoice(frozenset({"bash"}), required=True), {"type": "function", "function": {"name": "bash"}}),
        (ToolChoice(frozenset({"bash"})), None),
        (ToolChoice(frozenset({"bash", "ls"}), required=True), "required"),
    ],
)
def test_the_choice_of_a_tool_is_passed_on(choice: ToolChoice, expected: object) -> None:
    found = chat_request(parsed(Message("user", "x"), tools=[TOOL], tool_choice=choice), 1.0, 8)
    assert found.get("tool_choice") == expected
    without_tools = chat_request(parsed(Message("user", "x"), tool_choice=choice), 1.0, 8)
    assert "tool_choice" not in without_tools


async def test_a_request_names_model_key_and_own_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret-1")
    found, (request,) = await ask(
        says("yes"), key="${SOME_KEY}", body={"max_tokens": None, "max_completion_tokens": 9, "stream_options": None}
    )
    assert (found.text, found.finish) == ("yes", "stop")
    assert request.path == "/v1/chat/completions" and request.headers["authorization"] == "Bearer sk-secret-1"
    assert request.body == {
        "model": "big",
        "messages": REQUEST["messages"],
        "stream": True,
        "max_completion_tokens": 9,
    }


async def test_tool_calls_and_reasoning_are_read() -> None:
    found, _ = await ask(calls("ls", "pwd"))
    assert [(one.name, json.loads(one.arguments)["command"]) for one in found.calls] == [
        ("bash", "ls"),
        ("bash", "pwd"),
    ]
    found, _ = await ask(completion({"role": "assistant", "content": "b", "reasoning_content": "a"}, "length"))
    assert (found.reasoning, found.text, found.finish) == ("a", "b", "length")


@pytest.mark.parametrize("answer", [DROP, *map(refuses, (408, 409, 425, 429, 500, 502, 503, 529))])
async def test_a_failure_of_the_endpoint_is_waited_for(answer: Answer) -> None:
    error, _ = await ask(answer)
    assert isinstance(error, EndpointUnavailableError) and not error.for_a_person


def error_body(message: str = "no", **more: Any) -> JsonObject:
    return {"error": {"message": message, **more}}


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (refuses(401), "check endpoint.key"),
        (refuses(402), "account of endpoint.key"),
        (refuses(403), "check endpoint.key and endpoint.model"),
        *(
            (refuses(status), "check endpoint.url, endpoint.model")
            for status in (301, 307, 404, 405, 406, 410, 415, 418)
        ),
        ((400, error_body(code="model_not_found")), "check endpoint.url, endpoint.model"),
        ((400, error_body(type="authentication_error")), "endpoint.key"),
    ],
)
async def test_what_the_config_names_wrongly_is_waited_for_and_named(answer: Answer, named: str) -> None:
    error, _ = await ask(answer)
    assert isinstance(error, EndpointUnavailableError) and error.for_a_person and named in str(error)


ENDED = [{"message": {"content": "a"}, "finish_reason": "stop"}]


@pytest.mark.parametrize(
    "answer",
    [
        (200, {"choices": [{"index": 0}]}),
        (200, {"what": 1}),
        (200, {"choices": [1]}),
        (200, {"choices": ENDED, "usage": {"prompt_tokens": "many"}}),
        (200, {"choices": ENDED, "usage": [1]}),
    ],
)
async def test_an_answer_in_an_unknown_form_is_no_answer_of_the_model(answer: Answer) -> None:
    error, _ = await ask(answer)
    assert isinstance(error, EndpointUnavailableError)


@pytest.mark.parametrize(
    "answer",
    [
        *map(refuses, (400, 422, 451)),
        (403, error_body("the input was flagged by moderation")),
        (200, error_body("no such role: api_key, model_not_found", type="invalid_request_error")),
    ],
)
async def test_what_the_endpoint_says_of_the_request_is_no_outage(answer: Answer) -> None:
    error, _ = await ask(answer)
    assert isinstance(error, EndpointRejectedError)
    assert exit_of_error(classify(error).message) is AgentExit.CRASHED


async def test_a_request_that_is_too_large_is_a_full_context() -> None:
    error, _ = await ask(refuses(413))
    assert isinstance(error, EndpointContextError)


@pytest.mark.parametrize(
    ("message", "counts"),
    [
        ("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.", (5000, 4096)),
        ("prompt is too long: 210000 tokens > 200000 maximum", (210000, 200000)),
        ("the request exceeds the available context size", (None, None)),
    ],
)
async def test_a_full_context_is_recognised(message: str, counts: tuple[int | None, int | None]) -> None:
    error, _ = await ask((400, {"error": {"message": message}}))
    assert isinstance(error, EndpointContextError) and (error.num_tokens, error.max_tokens) == counts


async def test_no_message_repeats_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret-2")
    told = {"error": {"message": "Incorrect API key provided: sk-secret-2."}}
    for status in (401, 400):
        error, _ = await ask((status, told), key="${SOME_KEY}")
        assert "Incorrect API key" in str(error) and "sk-secret-2" not in str(error)


async def test_a_wrong_key_or_model_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (refuses(307), refuses(401), refuses(404), refuses(400)):
        with ChatEngine([answer]) as server, pytest.raises(ConfigError, match="endpoint: http"):
            await check_endpoint(endpoint(server.port), [1.0])
    for answer in (refuses(429), refuses(503), DROP, says("OK")):
        with ChatEngine([answer]) as server:
            await check_endpoint(endpoint(server.port), [1.0])  # the rollouts wait for it
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with ChatEngine([says("OK")]) as server, pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        await check_endpoint(endpoint(server.port, key="${NO_SUCH_KEY}"), [1.0])


@pytest.mark.parametrize("url", ["api.example.org/v1", "http://", "https://me:secret@host/v1", "https://host/v1?key=1"])
def test_an_address_that_hides_a_key_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        EndpointConfig(url=url, model="m")
