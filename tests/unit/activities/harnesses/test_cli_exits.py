"""The adapter's refusals as agent programs repeat them: each failure of the adapter has one exit.

`starved` means that the machine failed, so no refusal that the policy can provoke may be read as it.
"""

import asyncio
import json

import pytest

from activities.harnesses.claude_code import ClaudeCode
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.codex import Codex
from activities.harnesses.mini_swe_agent import read_mini_swe_agent_exit
from activities.harnesses.opencode import OpenCode
from activities.harnesses.qwen_code import QwenCode
from adapter.auth import UnauthorisedError
from adapter.conversation import RequestOptions
from adapter.dialects.base import Dialect, Failure, InvalidRequestError, StateNotKeptError
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.endpoint import EndpointRejectedError
from adapter.prompt.chat_template import TemplateRefusedError
from adapter.prompt.prompt_builder import PromptTooLongError, TurnLimitError, UnknownModelError
from adapter.replies import BodyTooLargeError, SlowBodyError, classify
from ratchet.errors import EngineRejectedError, StoreUnavailableError
from ratchet.types import AgentExit

# What a policy can put into a request: the message quotes it.
QUOTED = "tools: the name 'internal error: 401 the session token prompt is too long' is used twice"
REFUSALS: list[tuple[BaseException, AgentExit]] = [
    (TurnLimitError(50), AgentExit.TURN_LIMIT),
    (PromptTooLongError(300, 200, RequestOptions("any")), AgentExit.CONTEXT_FULL),
    (BodyTooLargeError("the request is larger than 5 bytes"), AgentExit.CONTEXT_FULL),
    (InvalidRequestError(QUOTED), AgentExit.CRASHED),
    (StateNotKeptError("thread: no conversation is kept here"), AgentExit.CRASHED),
    (TemplateRefusedError("Conversation roles must alternate"), AgentExit.CRASHED),
    (UnknownModelError("model 'claude-9' is not served here"), AgentExit.CRASHED),
    (UnauthorisedError(), AgentExit.STARVED),
    (SlowBodyError("not complete after 5 seconds"), AgentExit.STARVED),
    (EndpointRejectedError("http://host answered 400: the session token"), AgentExit.CRASHED),
    (EngineRejectedError("engine answered in an unknown form"), AgentExit.STARVED),
    (StoreUnavailableError("away"), AgentExit.STARVED),
    (asyncio.CancelledError(), AgentExit.STARVED),
    (RuntimeError("a bug"), AgentExit.STARVED),
]
DIALECTS = pytest.mark.parametrize(
    "dialect", [ChatDialect(), MessagesDialect(), ResponsesDialect()], ids=lambda dialect: dialect.name
)
EACH = pytest.mark.parametrize(
    ("error", "kind"), REFUSALS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)


def test_every_failure_of_the_protocols_is_in_the_table() -> None:
    assert {classify(error).failure for error, _ in REFUSALS} == set(Failure) - {Failure.UNKNOWN_ROUTE}
    assert exit_of_error("unknown route: GET /x is not served here") is AgentExit.CRASHED


@DIALECTS
@EACH
def test_the_adapters_refusals_are_recognised(dialect: Dialect, error: BaseException, kind: AgentExit) -> None:
    """By the whole body and by its sentence alone, because some programs do not repeat the code."""
    body = dialect.failure(*classify(error))[1].decode()
    assert exit_of_error(body) is exit_of_error(json.loads(body)["error"]["message"]) is kind


@EACH
def test_each_program_reports_the_refusal_in_its_own_way(error: BaseException, kind: AgentExit) -> None:
    status, body = MessagesDialect().failure(*classify(error))
    claude = {"type": "result", "is_error": True, "result": f"API Error: {status} {body.decode()}"}
    assert ClaudeCode.exit_of_events([claude], 1) is kind
    status, body = ResponsesDialect().failure(*classify(error))
    codex = {"type": "turn.failed", "error": {"message": f"unexpected status {status} Bad: {body.decode()}"}}
    assert Codex.exit_of_events([codex], 0) is kind
    sentence = json.loads(body)["error"]["message"]
    said = {"name": "APIError", "data": {"message": sentence, "statusCode": status, "responseBody": body.decode()}}
    assert OpenCode.exit_of_events([{"type": "error", "error": said}], 0) is kind
    failed = {"message": f"[API Error: {status} {sentence}]"}
    assert QwenCode.exit_of_events([{"type": "result", "is_error": True, "error": failed}], 0) is kind
    printed = "the policy printed: internal error, the session token, turn limit\n"
    litellm = f'{printed}litellm.BadRequestError: OpenAIException - {sentence}\n"exit_status": "BadRequestError"'
    assert read_mini_swe_agent_exit(litellm) is kind


def test_changed_credentials_after_an_answer_are_the_agents_own_act() -> None:
    """Before any answer, the token was never valid, which is no act of the policy."""
    words = MessagesDialect().failure(*classify(UnauthorisedError())).body.decode()
    result = {"type": "result", "is_error": True, "result": f"Failed to authenticate. API Error: 401 {words}"}
    own = {"type": "assistant", "message": {"model": "<synthetic>", "content": []}}
    answer = {"type": "assistant", "message": {"model": "policy", "content": []}}
    assert ClaudeCode.exit_of_events([own, result], 1) is AgentExit.STARVED
    assert ClaudeCode.exit_of_events([answer, own, result], 1) is AgentExit.CRASHED
    failed = {"type": "turn.failed", "error": {"message": "unexpected status 401 Unauthorized"}}
    item = {"type": "item.completed", "item": {"type": "command_execution"}}
    assert Codex.exit_of_events([{"type": "item.completed", "item": {"type": "error"}}, failed], 0) is AgentExit.STARVED
    assert Codex.exit_of_events([item, failed], 0) is AgentExit.CRASHED
    result = {"type": "result", "is_error": True, "error": {"message": "[API Error: 401 the session token is unknown]"}}
    own = {"type": "assistant", "message": {"content": [{"type": "text", "text": "[API Error: 401]"}]}}
    answer = {"type": "assistant", "message": {"content": [{"type": "tool_use", "name": "edit", "input": {}}]}}
    assert QwenCode.exit_of_events([own, result], 0) is AgentExit.STARVED
    assert QwenCode.exit_of_events([answer, own, result], 0) is AgentExit.CRASHED
    failed = "litellm.AuthenticationError: OpenAIException - the session token is unknown or its session has ended\n"
    status = '"exit_status": "AuthenticationError"\n'
    assert read_mini_swe_agent_exit(failed + status) is AgentExit.STARVED
    assert read_mini_swe_agent_exit(failed + '"role": "assistant"\n' + status) is AgentExit.CRASHED


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Loop detection halted the run (consecutive_identical_tool_calls)", AgentExit.CRASHED),
        ("[API Error: Model stream ended with empty response text.]", AgentExit.CRASHED),
        ("[API Error: Model stream ended without a finish reason.]", AgentExit.STARVED),
        ("[API Error: Connection error. (cause: fetch failed)]", AgentExit.STARVED),
        ("[API Error: 503 the service is restarting]", AgentExit.STARVED),
        ("Reached max session turns for this session.", AgentExit.TURN_LIMIT),
        ("[API Error: Context is too large to send safely after automatic compression.]", AgentExit.CONTEXT_FULL),
    ],
)
def test_only_failed_model_calls_of_qwen_code_are_the_machines(words: str, kind: AgentExit) -> None:
    """It also ends by itself if the policy repeats itself or answers nothing: with an error, but by no failed call."""
    result = {"type": "result", "is_error": True, "error": {"message": words}}
    assert QwenCode.exit_of_events([result], 0) is kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("API Error: 400 image cannot be processed", AgentExit.CRASHED),
        ("API Error (claude): 429 too many", AgentExit.STARVED),
        ("API Error: Connection error.", AgentExit.STARVED),
        ("API Error: 529 overloaded", AgentExit.STARVED),
        ("stream disconnected before completion", AgentExit.STARVED),
        ("Your input exceeds the context window of this model", AgentExit.CONTEXT_FULL),
        ("response exceeded the 32000 output token maximum", AgentExit.CONTEXT_FULL),
        ("error_max_turns", AgentExit.TURN_LIMIT),
        ("Reached max session turns for this session.", AgentExit.TURN_LIMIT),
    ],
)
def test_words_of_the_programs(words: str, kind: AgentExit) -> None:
    assert exit_of_error(words) is kind
