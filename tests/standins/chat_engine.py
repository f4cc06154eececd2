"""A Chat Completions server that answers from a script, in place of an adapter and its engine.

Tests of harnesses need refusals, dropped connections and odd answers, which no real server gives on demand.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.standins.http_server import LoopbackServer, QuietHandler

DROP = (0, {})
"""Close the connection without an answer, as a killed adapter does."""

Answer = tuple[int, dict[str, Any]]


def says(text: str, finish_reason: str = "stop") -> Answer:
    return completion({"role": "assistant", "content": text}, finish_reason)


def calls(*commands: str, name: str = "bash") -> Answer:
    tool_calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"command": command})},
        }
        for number, command in enumerate(commands)
    ]
    return completion({"role": "assistant", "content": None, "tool_calls": tool_calls}, "tool_calls")


def completion(message: dict[str, Any], finish_reason: str) -> Answer:
    return 200, {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }


def refuses(status: int, code: str = "error") -> Answer:
    return status, {"error": {"message": "scripted", "type": "invalid_request_error", "code": code}}


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ChatEngine:
    """Gives the answers in order and repeats the last one. `requests` has all requests. Port 0 picks a free port."""

    answers: Sequence[Answer]
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        engine = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.body())
                headers = {key.lower(): value for key, value in self.headers.items()}
                status, answer = engine.answers[min(len(engine.requests), len(engine.answers) - 1)]
                engine.requests.append(Request(self.path, headers, body))
                if status == 0:
                    self.close_connection = True
                    return
                self.answer(status, json.dumps(answer).encode())

        self.server = LoopbackServer(Handler, self.port)
        self.port = self.server.port
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
