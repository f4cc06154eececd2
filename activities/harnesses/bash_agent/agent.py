"""A small agent with one tool, `bash`: one file of standard-library Python 3.8 that runs in the box.

`command.sh` runs it as `python3 -I -S agent.py config.json`. It reads the session token from RATCHET_SESSION_TOKEN,
writes its transcript to standard output, one JSON object per line, and one line to standard error unless it ends by
itself. It imports little (no typing, dataclasses or urllib.request), because starting costs more CPU time than working.
The tiny policy's transcripts use its formats.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EXIT_DONE = 0
EXIT_TURN_LIMIT = 10
EXIT_CONTEXT_FULL = 11
EXIT_STARVED = 12
EXIT_REFUSED = 13

RETRIED_STATUSES = (408, 409, 425, 429)
FIRST_BACKOFF_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 5.0
NO_OUTPUT = "(no output)"

BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command in the working directory and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, as for bash -c."}},
            "required": ["command"],
        },
    },
}


class ContextFullError(Exception):
    """The conversation no longer fits into the model's context."""


class TurnsSpentError(Exception):
    """The session has no model calls left; another process of the box may have made some."""


class StarvedError(Exception):
    """The adapter could not be reached, or kept answering with errors."""


class RefusedError(Exception):
    """The adapter refused the conversation for what it contains."""


class Config:
    """`config.json`, written by `harness.py`. `outage_seconds`: how long a model call is repeated before giving up."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.base_url: str = values["base_url"]
        self.model: str = values["model"]
        self.workdir: str = values["workdir"]
        self.system_prompt: str = values["system_prompt"]
        self.user_prompt: str = values["user_prompt"]
        self.max_turns: int = values["max_turns"] or sys.maxsize
        self.step_timeout_seconds: float = values["step_timeout_seconds"] or float("inf")
        self.output_limit_bytes: int = values["output_limit_bytes"]
        self.request_timeout_seconds: float = values["request_timeout_seconds"]
        self.outage_seconds: float = values["outage_seconds"]


def format_observation(output: bytes, exit_code: int, timed_out_after: float | None = None) -> str:
    """Return the text of a tool message: the output, the exit code unless 0, and NO_OUTPUT if there is neither."""
    lines = [output.decode("utf-8", "replace").rstrip("\n")]
    if timed_out_after is not None:
        lines.append(f"timed out after {timed_out_after:g} seconds")
    elif exit_code != 0:
        lines.append(f"exit code {exit_code}")
    return "\n".join(line for line in lines if line) or NO_OUTPUT


class CappedOutput:
    """Keeps the first and the last half of `limit` bytes of a command's output."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head = b""
        self.tail = b""
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        surplus = len(self.tail) - self.half
        if surplus > 0:
            self.dropped += surplus
            self.tail = self.tail[surplus:]

    def text(self) -> bytes:
        gap = b"\n... %d bytes left out ...\n" % self.dropped if self.dropped else b""
        return self.head + gap + self.tail


def run_bash(command: str, workdir: str, timeout_seconds: float, limit_bytes: int) -> tuple[str, int]:
    """Run one command in a session of its own; return the observation and the exit code (-9 if it timed out).

    Returns when the command itself has ended; its background processes continue, but their pipe is closed.
    """
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=workdir,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output = CappedOutput(limit_bytes)
    timed_out = not drain(process, process.stdout.fileno(), output, time.monotonic() + timeout_seconds)
    if timed_out:
        os.killpg(process.pid, signal.SIGKILL)  # the leader is not reaped yet, so the group exists
    exit_code = process.wait()
    process.stdout.close()
    return format_observation(output.text(), exit_code, timeout_seconds if timed_out else None), exit_code


def drain(process: subprocess.Popen[bytes], pipe: int, output: CappedOutput, deadline: float) -> bool:
    """Read until the command has ended; return False if the deadline came first."""
    os.set_blocking(pipe, False)
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    try:
        handle = os.pidfd_open(process.pid)
        poller.register(handle, select.POLLIN)
    except (AttributeError, OSError):  # an old Python or kernel: poll every 50 ms instead
        handle = -1
    try:
        while True:
            left = deadline - time.monotonic()
            poller.poll(1000 * min(max(left, 0), 3600 if handle >= 0 else 0.05))
            ended = process.poll() is not None  # before reading, so that no output before the end is missed
            if not read_all(pipe, output):
                return ended or wait_for(process, max(deadline - time.monotonic(), 0))
            if ended:
                return True
            if left <= 0:
                return False
    finally:
        if handle >= 0:
            os.close(handle)


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def read_all(pipe: int, output: CappedOutput, max_chunks: int = 64) -> bool:
    """Read what is available; return False at the end of the stream. Bounded, so that endless output cannot delay
    the deadline check."""
    for _ in range(max_chunks):
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        output.add(data)
    return True


class Adapter:
    """Chat Completions over one connection; a call is repeated unchanged until it is answered or given up."""

    def __init__(self, config: Config, token: str) -> None:
        url = urlsplit(config.base_url)
        self.config = config
        self.path = url.path.rstrip("/") + "/v1/chat/completions"
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.answered = False
        self.connection = kind(url.hostname or "", url.port, timeout=config.request_timeout_seconds)

    def complete(self, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
        """Return the answer and how often the call was repeated."""
        body = json.dumps(
            {"model": self.config.model, "messages": messages, "tools": [BASH_TOOL], "stream": False}
        ).encode()
        retries = 0
        started = time.monotonic()
        while True:
            answer, problem, pause = self.ask(body, retries)
            if answer is not None:
                return answer, retries
            self.connection.close()
            if time.monotonic() + pause - started > self.config.outage_seconds:
                raise StarvedError(f"gave up after {retries + 1} calls: {problem}")
            time.sleep(pause)
            retries += 1

    def ask(self, body: bytes, retries: int) -> tuple[dict[str, Any] | None, str, float]:
        """Make one call: (answer, "", 0), or (None, the problem, seconds to wait before the next one)."""
        jitter = 0.75 + os.urandom(1)[0] / 512
        pause = jitter * min(FIRST_BACKOFF_SECONDS * 2 ** min(retries, 10), MAX_BACKOFF_SECONDS)
        try:
            self.connection.request("POST", self.path, body, {**self.headers, "x-stainless-retry-count": str(retries)})
            response = self.connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            return None, f"{type(error).__name__}: {error}", pause
        if status == 200:
            try:
                answer: dict[str, Any] = json.loads(data)
                answer["choices"][0]["message"]["role"]
            except (ValueError, LookupError, TypeError):
                return None, f"not a chat completion: {data[:200]!r}", pause
            self.answered = True
            return answer, "", 0.0
        problem = f"HTTP {status}: {data[:300].decode('utf-8', 'replace')}"
        if status in RETRIED_STATUSES or status >= 500:
            return None, problem, pause
        if b"context_length_exceeded" in data or status == 413:
            raise ContextFullError(problem)
        if b"turn_limit_reached" in data:
            raise TurnsSpentError(problem)
        # After an answer, a 401 is no failure of the machine: the token was valid.
        if (status == 401 and not self.answered) or error_message(data).startswith("the engine refused"):
            raise StarvedError(problem)
        raise RefusedError(problem)


def error_message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


def write_event(event: str, **fields: Any) -> None:
    """Write one line of the transcript and flush it, so that it survives a crash."""
    sys.stdout.write(json.dumps({"event": event, "time": round(time.time(), 3), **fields}) + "\n")
    sys.stdout.flush()


def read_command(call: dict[str, Any]) -> tuple[str | None, str]:
    """Return (command, "") or (None, the message for the model)."""
    function = call.get("function") or {}
    if function.get("name") != "bash":
        return None, f"error: no tool {function.get('name')}"
    try:
        command = json.loads(function.get("arguments") or "{}").get("command")
    except (ValueError, AttributeError):
        command = None
    if not isinstance(command, str) or "\0" in command:
        return None, "error: bash needs the parameter command"
    return command, ""


def run_call(call: dict[str, Any], config: Config) -> dict[str, Any]:
    """Run one tool call and return the tool message with its result."""
    started = time.monotonic()
    command, observation = read_command(call)
    exit_code = None
    if command is not None:
        observation, exit_code = run_bash(
            command, config.workdir, config.step_timeout_seconds, config.output_limit_bytes
        )
    seconds = round(time.monotonic() - started, 3)
    write_event("step", command=command, observation=observation, exit_code=exit_code, seconds=seconds)
    return {"role": "tool", "tool_call_id": call.get("id") or "", "content": observation}


def run_turns(config: Config, adapter: Adapter) -> int:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": config.system_prompt},
        {"role": "user", "content": config.user_prompt},
    ]
    write_event("start", model=config.model, messages=messages)
    for _ in range(config.max_turns):
        started = time.monotonic()
        answer, retries = adapter.complete(messages)
        choice = answer["choices"][0]
        message = choice["message"]
        seconds = round(time.monotonic() - started, 3)
        write_event(
            "turn",
            message=message,
            finish_reason=choice.get("finish_reason"),
            usage=answer.get("usage"),
            retries=retries,
            seconds=seconds,
        )
        if choice.get("finish_reason") == "length":  # do not run a command that was cut
            raise ContextFullError("the answer was cut at the token limit")
        calls = message.get("tool_calls") or []
        if not calls:
            return EXIT_DONE
        messages.append(message)
        messages.extend(run_call(call, config) for call in calls)
    return EXIT_TURN_LIMIT


def run_bash_agent(config_path: str) -> int:
    token = os.environ.pop("RATCHET_SESSION_TOKEN", "")  # not handed on to the commands
    with open(config_path, encoding="utf-8") as file:
        config = Config(json.load(file))
    detail = ""
    try:
        exit_code = run_turns(config, Adapter(config, token))
    except ContextFullError as error:
        exit_code, detail = EXIT_CONTEXT_FULL, str(error)
    except TurnsSpentError as error:
        exit_code, detail = EXIT_TURN_LIMIT, str(error)
    except StarvedError as error:
        exit_code, detail = EXIT_STARVED, str(error)
    except RefusedError as error:
        exit_code, detail = EXIT_REFUSED, str(error)
    write_event("exit", exit_code=exit_code, detail=detail)
    if detail:
        print(detail.replace("\n", " "), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(run_bash_agent(sys.argv[1]))
