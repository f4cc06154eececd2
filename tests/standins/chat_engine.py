"""A Chat Completions server that answers from a script: what the adapter would say, without an adapter or an engine.

Why here: the agent has to be seen to handle refusals, drops and odd answers that no real part gives on demand.
Called by: tests of harnesses.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

DROP = (0, {})
"""The connection is closed without an answer, as by a killed adapter."""

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
    """Gives the answers in order, the last one for ever; `requests` holds what came in. Port 0 picks a free one."""

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
