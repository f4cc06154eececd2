"""`/files`: uploads and downloads, streamed to and from an fd of the box's file helper, never held whole."""

import asyncio
import errno
import os
import zlib
from collections.abc import AsyncIterator, Callable

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sandbox_gateway.box_client import BoxClient
from sandbox_gateway.boxd.protocol import BoxFaultError
from sandbox_gateway.wire_errors import RefusalError

_CHUNK_BYTES = 256 << 10
_GZIP_WINDOW = 31
_STATUS = {
    "not_found": 404,
    "unauthenticated": 401,
    "resource_exhausted": 507,
    "permission_denied": 403,
    "unavailable": 503,
}
_PART_EVENTS = (
    "part_begin", "header_field", "header_value", "header_end", "headers_finished", "part_data", "part_end", "end",
)  # fmt: skip
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


async def serve_files(request: Request, box: BoxClient) -> Response:
    try:
        if request.method == "GET":
            return await _download(request, box)
        if request.method == "POST":
            return await _upload(request, box)
    except BoxFaultError as error:
        raise RefusalError(_STATUS.get(error.code, 400), error.message) from error
    raise RefusalError(405, f"{request.method} /files is not supported")


def _user(request: Request) -> str:
    return request.query_params.get("username") or "root"


def _checked_path(path: str) -> str:
    if not path or "\0" in path:
        raise RefusalError(400, "path is empty or contains a NUL byte")
    return path


async def _download(request: Request, box: BoxClient) -> Response:
    path = _checked_path(request.query_params.get("path", ""))
    reply, (fd,) = await box.files(op="open_read", path=path, user=_user(request))
    if reply["size"] == 0:  # as files of /proc say that have a content
        return Response(await asyncio.to_thread(_read_small, fd), media_type="application/octet-stream")
    headers = {"Content-Length": str(reply["size"])}
    return StreamingResponse(_read_exactly(fd, reply["size"]), media_type="application/octet-stream", headers=headers)


def _read_small(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read(_CHUNK_BYTES)


async def _read_exactly(fd: int, size: int) -> AsyncIterator[bytes]:
    """Yield `size` bytes, as the header promised, of a file that grows; if it shrinks, abort the connection."""
    left = size
    try:
        while left:
            chunk = await asyncio.to_thread(os.read, fd, min(left, _CHUNK_BYTES))
            if not chunk:
                raise ConnectionError(f"the file lost {left} bytes while it was read")
            left -= len(chunk)
            yield chunk
    finally:
        os.close(fd)


class _Upload:
    """The files of one request, at most one open at a time, written in large pieces off the event loop."""

    def __init__(self, box: BoxClient, user: str) -> None:
        self._box = box
        self._user = user
        self._fd: int | None = None
        self._pending = bytearray()
        self.written: list[dict[str, str]] = []

    async def open(self, path: str) -> None:
        await self.finish_file()
        reply, (self._fd,) = await self._box.files(op="open_write", path=_checked_path(path), user=self._user)
        self.written.append({"path": reply["path"], "name": reply["name"], "type": "file"})

    async def write(self, data: bytes) -> None:
        if self._fd is not None:
            self._pending += data
            if len(self._pending) >= _CHUNK_BYTES:
                await self._flush()

    async def finish_file(self) -> None:
        if self._fd is not None:
            await self._flush()
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def _flush(self) -> None:
        data = self._pending
        self._pending = bytearray()
        assert self._fd is not None
        try:
            await asyncio.to_thread(_write_all, self._fd, data)
        except OSError as error:
            status = 507 if error.errno in _FULL_DISK else 400
            raise RefusalError(status, f"the file cannot be written: {error.strerror}") from error


def _write_all(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


async def _upload(request: Request, box: BoxClient) -> Response:
    content_type, options = parse_options_header(request.headers.get("content-type"))
    upload = _Upload(box, _user(request))
    try:
        if content_type == b"application/octet-stream":
            await _receive_raw(request, upload)
        elif content_type == b"multipart/form-data" and options.get(b"boundary"):
            await _receive_multipart(request, upload, options[b"boundary"])
        else:
            raise RefusalError(400, "an upload is application/octet-stream, or multipart/form-data with a boundary")
        await upload.finish_file()
    except ClientDisconnect as error:
        raise RefusalError(400, "the client went away before the upload was complete") from error
    finally:
        upload.close()
    return JSONResponse(upload.written)


async def _receive_raw(request: Request, upload: _Upload) -> None:
    await upload.open(request.query_params.get("path", ""))
    async for data in _body(request):
        await upload.write(data)


async def _body(request: Request) -> AsyncIterator[bytes]:
    """Yield the body, decompressed by pieces: a gzip bomb fills at most the box's disk, never our memory."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        async for chunk in request.stream():
            yield chunk
        return
    if encoding != "gzip":
        raise RefusalError(400, f"unsupported Content-Encoding: {encoding[:40]}, supported: gzip")
    inflate = zlib.decompressobj(_GZIP_WINDOW)
    try:
        async for chunk in request.stream():
            while chunk and not inflate.eof:
                yield inflate.decompress(chunk, _CHUNK_BYTES)
                chunk = inflate.unconsumed_tail
    except zlib.error as error:
        raise RefusalError(400, f"the body is not gzip: {error}") from error
    if not inflate.eof:
        raise RefusalError(400, "the gzip body ends too early")


async def _receive_multipart(request: Request, upload: _Upload, boundary: bytes) -> None:
    """Store every part called `file`; its path is the query's, else the part's own file name."""
    events: list[tuple[str, bytes]] = []  # from the parser's callbacks, which cannot wait

    def noting(kind: str) -> Callable[..., None]:
        return lambda data=b"", start=0, end=None: events.append((kind, data[start:end]))

    parser = MultipartParser(boundary, {f"on_{kind}": noting(kind) for kind in _PART_EVENTS})  # type: ignore[arg-type]
    name = value = disposition = b""
    kind = ""
    async for piece in _body(request):
        try:
            parser.write(piece)
        except MultipartParseError as error:
            raise RefusalError(400, f"the multipart body is broken: {error}") from error
        for kind, data in events:
            if kind == "part_begin":
                name = value = disposition = b""
            elif kind == "header_field":
                name += data
            elif kind == "header_value":
                value += data
            elif kind == "header_end":
                disposition = value if name.lower() == b"content-disposition" else disposition
                name = value = b""
            elif kind == "headers_finished":
                _, options = parse_options_header(disposition)
                if options.get(b"name") == b"file":
                    path = request.query_params.get("path", "")
                    await upload.open(path or options.get(b"filename", b"").decode("utf-8", "replace"))
            elif kind == "part_data":
                await upload.write(data)
            elif kind == "part_end":
                await upload.finish_file()
        events.clear()
    if kind != "end":
        raise RefusalError(400, "the multipart body ends too early")
