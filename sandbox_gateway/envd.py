"""The RPCs that E2B's in-box daemon envd serves: processes and file system metadata. They are translated into requests
to boxd, so the box itself runs no daemon that its root could kill."""

import base64
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sandbox_gateway.box_client import BoxClient, BoxStream
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.connect_protocol import (
    STREAM_TYPE,
    UNARY_TYPE,
    Body,
    parse,
    read_body,
    require_content_type,
    stream_error,
    unary_error,
    unwrap_envelope,
    without_empty,
)
from sandbox_gateway.process_streams import InputBytes, Selector, process_events, send_input, stream_input
from sandbox_gateway.wire_errors import unsupported

DEFAULT_USER = ""
"""Empty: the image's user; root for the host image."""
_SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15, 9: 9, 15: 15}
_KEEPALIVE_SECONDS = 90


UnaryCall = Callable[[BoxClient, bytes, str], Awaitable[dict[str, Any]]]
"""A call about a box, its body and the box's user."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL byte")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]


class ProcessConfig(Body):
    cmd: Text = Field(min_length=1)
    args: list[Text] = Field(default_factory=list)
    envs: dict[Text, Text] = Field(default_factory=dict)
    cwd: Text = ""


class TerminalSize(Body):
    rows: int = Field(default=0, ge=0, le=4096)
    cols: int = Field(default=0, ge=0, le=4096)


class Terminal(Body):
    size: TerminalSize = TerminalSize(rows=24, cols=80)


class StartBody(Body):
    process: ProcessConfig
    stdin: bool = True
    tag: str = ""
    pty: Terminal | None = None


class SelectBody(Body):
    process: Selector


class SignalBody(SelectBody):
    signal: str | int


class UpdateBody(SelectBody):
    pty: Terminal


class InputBody(SelectBody):
    input: InputBytes


class PathBody(Body):
    path: Text = ""


class ListBody(PathBody):
    depth: int = Field(default=1, ge=0, le=4096)


class MoveBody(PathBody):
    path: Text = Field(alias="source")
    destination: Text


async def serve_rpc(request: Request, box: BoxClient, service: str, method: str) -> Response:
    """Serve one RPC call on a running box. Refusals are returned in the form that the kind of call requires."""
    streaming = _STREAMING.get((service, method))
    unary = _UNARY.get((service, method))
    if streaming is None and unary is None:
        words = unsupported(f"{service}/{method}"[:200], _REMEDIES.get(method, _NO_REMEDY))
        refused = BoxFaultError("unimplemented", words)
        is_stream = request.headers.get("content-type", "").startswith(STREAM_TYPE)
        return stream_error(refused) if is_stream else unary_error(refused)
    if streaming is not None:
        require_content_type(request, STREAM_TYPE)
        try:
            return await streaming(request, box)
        except BoxFaultError as error:
            return stream_error(error)
    require_content_type(request, UNARY_TYPE)
    assert unary is not None
    try:
        return JSONResponse(await unary(box, await read_body(request), _user(request)))
    except BoxFaultError as error:
        return unary_error(error)


def _user(request: Request) -> str:
    """Return the user name of `Authorization: Basic`; RPCs carry no password."""
    header = request.headers.get("authorization", "")
    if not header.startswith("Basic "):
        return DEFAULT_USER
    try:
        name = base64.b64decode(header[6:], validate=True).decode().partition(":")[0]
    except ValueError as error:
        raise BoxFaultError("unauthenticated", "the Authorization header is not Basic credentials") from error
    if "\0" in name or ":" in name or "\n" in name:
        raise BoxFaultError("unauthenticated", f"invalid username: {name[:64]!r}")
    return name


def _header_number(request: Request, name: str, default: int) -> int:
    text = request.headers.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BoxFaultError("invalid_argument", f"{name}: {text[:40]!r} is not a number")
    return int(text)


async def _start(request: Request, box: BoxClient) -> Response:
    body = parse(StartBody, unwrap_envelope(await read_body(request)))
    stream = await box.follow(
        op="start",
        command=body.process.cmd,
        args=body.process.args,
        env=body.process.envs,
        cwd=body.process.cwd,
        user=_user(request),
        wants_stdin=body.stdin,
        tag=body.tag,
        timeout_seconds=_header_number(request, "connect-timeout-ms", 0) / 1000,
        terminal=[body.pty.size.rows, body.pty.size.cols] if body.pty is not None else None,
    )
    return _events(request, stream, started_here=True)


async def _connect(request: Request, box: BoxClient) -> Response:
    body = parse(SelectBody, unwrap_envelope(await read_body(request)))
    stream = await box.follow(op="attach", pid=body.process.pid, tag=body.process.tag)
    return _events(request, stream, started_here=False, seconds=_header_number(request, "connect-timeout-ms", 0) / 1000)


def _events(request: Request, stream: BoxStream, started_here: bool, seconds: float = 0.0) -> Response:
    keepalive_seconds = _header_number(request, "keepalive-ping-interval", _KEEPALIVE_SECONDS) or _KEEPALIVE_SECONDS
    return StreamingResponse(process_events(stream, keepalive_seconds, started_here, seconds), media_type=STREAM_TYPE)


async def _list_processes(box: BoxClient, _body: bytes, _user: str) -> dict[str, Any]:
    reply = await box.control(op="list")
    rows = []
    for row in reply["processes"]:
        config = {"cmd": row["cmd"], "args": row["args"], "envs": row["envs"], "cwd": row["cwd"]}
        rows.append(without_empty({"pid": row["pid"], "tag": row["tag"], "config": without_empty(config)}))
    return {"processes": rows}


async def _send_signal(box: BoxClient, data: bytes, _user: str) -> dict[str, Any]:
    body = parse(SignalBody, data)
    number = _SIGNALS.get(body.signal)
    if number is None:
        words = f"signal: {str(body.signal)[:40]!r} is neither SIGNAL_SIGKILL nor SIGNAL_SIGTERM"
        raise BoxFaultError("invalid_argument", words)
    return await box.control(op="signal", signal=number, pid=body.process.pid, tag=body.process.tag)


async def _send_input(box: BoxClient, data: bytes, _user: str) -> dict[str, Any]:
    body = parse(InputBody, data)
    return await send_input(box, body.process, body.input)


async def _update(box: BoxClient, data: bytes, _user: str) -> dict[str, Any]:
    body = parse(UpdateBody, data)
    size = [body.pty.size.rows, body.pty.size.cols]
    return await box.control(op="resize", size=size, pid=body.process.pid, tag=body.process.tag)


async def _close_stdin(box: BoxClient, data: bytes, _user: str) -> dict[str, Any]:
    body = parse(SelectBody, data)
    return await box.control(op="close_stdin", pid=body.process.pid, tag=body.process.tag)


def _on_files(op: str, model: type[PathBody] = PathBody) -> UnaryCall:
    """Return the call that does `op` of the file helper, whose request has the fields of the body."""

    async def call(box: BoxClient, data: bytes, user: str) -> dict[str, Any]:
        return (await box.files(op=op, user=user or "root", **parse(model, data).model_dump()))[0]

    return call


_WATCH_REMEDY = "use files.list, or run inotifywait as a command"
_REMEDIES = dict.fromkeys(("WatchDir", "CreateWatcher", "GetWatcherEvents", "RemoveWatcher"), _WATCH_REMEDY)
_NO_REMEDY = "use the calls for processes and files that this gateway's page lists"
_PROCESS, _FILESYSTEM = "process.Process", "filesystem.Filesystem"
_STREAMING: dict[tuple[str, str], Callable[[Request, BoxClient], Awaitable[Response]]] = {
    (_PROCESS, "Start"): _start,
    (_PROCESS, "Connect"): _connect,
    (_PROCESS, "StreamInput"): stream_input,
}
_UNARY: dict[tuple[str, str], UnaryCall] = {
    (_PROCESS, "List"): _list_processes,
    (_PROCESS, "SendSignal"): _send_signal,
    (_PROCESS, "SendInput"): _send_input,
    (_PROCESS, "Update"): _update,
    (_PROCESS, "CloseStdin"): _close_stdin,
    (_FILESYSTEM, "Stat"): _on_files("stat"),
    (_FILESYSTEM, "ListDir"): _on_files("list", ListBody),
    (_FILESYSTEM, "MakeDir"): _on_files("make_directory"),
    (_FILESYSTEM, "Remove"): _on_files("remove"),
    (_FILESYSTEM, "Move"): _on_files("move", MoveBody),
}
