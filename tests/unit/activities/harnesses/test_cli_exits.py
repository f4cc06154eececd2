"""The adapter's refusals as agent programs repeat them: a limit ends the rollout, any other error means starved."""

import json

import pytest

from activities.harnesses.cli_exits import exit_of_error
from adapter.auth import UnauthorisedError
from adapter.conversation import RequestOptions
from adapter.dialects.base import Dialect
from adapter.dialects.chat import ChatDialect
from adapter.dialects.messages import MessagesDialect
from adapter.dialects.responses import ResponsesDialect
from adapter.prompt.prompt_builder import PromptTooLongError, TurnLimitError
from adapter.replies import classify
from ratchet.errors import StoreUnavailableError
from ratchet.types import AgentExit


@pytest.mark.parametrize(
    "dialect", [ChatDialect(), MessagesDialect(), ResponsesDialect()], ids=lambda dialect: dialect.name
)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TurnLimitError(50), AgentExit.TURN_LIMIT),
        (PromptTooLongError(300, 200, RequestOptions("any")), AgentExit.CONTEXT_FULL),
        (UnauthorisedError(), AgentExit.STARVED),
        (StoreUnavailableError("away"), AgentExit.STARVED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_the_adapters_refusals_are_recognised(dialect: Dialect, error: Exception, kind: AgentExit) -> None:
    """By the whole body and by its sentence alone, because some programs do not repeat the code."""
    body = dialect.failure(*classify(error))[1].decode()
    assert exit_of_error(body) is exit_of_error(json.loads(body)["error"]["message"]) is kind
