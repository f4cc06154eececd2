"""A Chat Completions server that answers from a script, in place of an adapter and its engine.

Tests of harnesses need refusals, dropped connections and odd answers, which no real server gives on demand.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

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

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {key.lower(): value for key, value in self.headers.items()}
                status, answer = engine.answers[min(len(engine.requests), len(engine.answers) - 1)]
                engine.requests.append(Request(self.path, headers, body))
                if status == 0:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
