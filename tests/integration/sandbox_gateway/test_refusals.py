"""A refusal by a proxy on the way to the service, or by the service because of the installation, is never taken for the
fault of a command, a file or a task."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ratchet.errors import (
    CommandFailedError,
    ConfigError,
    SandboxBusyError,
    SandboxGoneError,
    SandboxRefusesError,
    UnknownImageError,
)
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess, make_box

_HTML = b"<html>the ingress says no</html>"
_METHODS = (b"POST ", b"GET ", b"DELETE ", b"PUT ")


class Proxy:
    """Passes bytes to the gateway. The next requests whose path has `part` are answered with `answers` instead."""

    def __init__(self, gateway_port: int) -> None:
        self.gateway_port = gateway_port
        self.part = ""
        self.answers: list[tuple[int, str, bytes]] = []
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []

    def refuse(self, part: str, *answers: tuple[int, str, bytes]) -> None:
        self.part = part
        self.answers = list(answers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.gateway_port)
        tasks = [
            asyncio.create_task(self._ask(reader, writer, back_writer)),
            asyncio.create_task(self._answer(back_reader, writer)),
        ]
        self.tasks += tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for end in (back_writer, writer):
            end.close()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                head = data.partition(b"\r\n")[0].decode(errors="replace")
                if data.startswith(_METHODS) and self.answers and self.part in head:
                    status, kind, body = self.answers.pop(0)
                    end = f"HTTP/1.1 {status} No\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    writer.write(end.encode() + b"Connection: close\r\n\r\n" + body)
                    await writer.drain()
                    return
                back.write(data)
                await back.drain()

    async def _answer(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await back.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0.05)


@pytest.fixture
async def proxy(gateway: GatewayProcess) -> AsyncIterator[Proxy]:
    made = Proxy(gateway.settings.port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await made.close()


@pytest.fixture
def behind(proxy: Proxy) -> E2BProvider:
    url = f"http://127.0.0.1:{proxy.port}"
    return E2BProvider(API_KEY, url, url)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 418, 451])
async def test_one_refusal_on_the_way_is_not_the_commands_own(
    gateway: GatewayProcess, proxy: Proxy, behind: E2BProvider, status: int
) -> None:
    box = await make_box(behind)
    try:
        refusal = (status, "text/html", _HTML)
        for part, call, expected in _calls(box):
            proxy.refuse(part, refusal)
            # Waiting is right, too; a failed command, a missing file or a wrong configuration is not.
            with contextlib.suppress(SandboxBusyError):
                assert await call() == expected, part
            assert not proxy.answers, part
    finally:
        await box.kill()


def _calls(box: Sandbox) -> list[tuple[str, Callable[[], Awaitable[object]], object]]:
    async def write_and_read() -> bytes:
        await box.write_file("/workspace/a", b"text")
        return await box.read_file("/workspace/a")

    async def run() -> int:
        return (await box.exec("true", check=False)).exit_code

    return [
        ("process.Process", run, 0),
        ("/files", write_and_read, b"text"),
        ("/files", lambda: box.read_file("/workspace/a", max_bytes=9), b"text"),
    ]


async def test_what_the_box_itself_refuses_is_its_own_word(box: Sandbox) -> None:
    assert (await box.exec("true", check=False, user="not-a-user")).exit_code == 126
    with pytest.raises(FileNotFoundError):
        await box.read_file("/workspace/missing")
    with pytest.raises(CommandFailedError):
        await box.read_file("/workspace")
    with pytest.raises(CommandFailedError):
        await box.write_file("/proc/version", b"x")


async def test_a_box_that_is_refused_everything_is_waited_for(proxy: Proxy, behind: E2BProvider) -> None:
    box = await make_box(behind)
    try:
        for status in (400, 401, 403, 404):
            proxy.refuse("process.Process", *[(status, "text/html", _HTML)] * 3)
            with pytest.raises(SandboxBusyError):
                await box.exec("true", check=False)
    finally:
        proxy.refuse("")
        await box.kill()


def _json(status: int, words: str) -> tuple[int, str, bytes]:
    return status, "application/json", b'{"code": %d, "message": "%s"}' % (status, words.encode())


_PATH_ERROR = _json(500, "error opening file: open /workspace/a: text file busy")


async def test_what_the_box_answers_with_500_to_a_path_is_final(proxy: Proxy, behind: E2BProvider) -> None:
    """E2B's own box does so. A failure that is over, a page of a proxy, and a failed command are not taken for it."""
    box = await make_box(behind)
    try:
        for call in (lambda: box.write_file("/workspace/a", b"x"), lambda: box.read_file("/workspace/a")):
            proxy.refuse("/files", _PATH_ERROR)
            await call()
            proxy.refuse("/files", _PATH_ERROR, _PATH_ERROR)
            with pytest.raises(CommandFailedError, match="text file busy"):
                await call()
            proxy.refuse("/files", *[(500, "text/html", _HTML)] * 2)
            with pytest.raises(SandboxBusyError):
                await call()
        proxy.refuse("process.Process", *[_PATH_ERROR] * 3)
        with pytest.raises(SandboxBusyError):
            await box.exec("true")
    finally:
        proxy.refuse("")
        await box.kill()


@pytest.mark.parametrize("status", [404, 502, 500])
async def test_a_box_that_is_gone_is_gone_whatever_the_way_to_it_answers(
    gateway: GatewayProcess, proxy: Proxy, behind: E2BProvider, status: int
) -> None:
    box = await make_box(behind)
    gateway.call("DELETE", f"/sandboxes/{box.id}")
    for part, call in (
        ("/files", lambda: box.write_file("/tmp/x", b"")),
        ("process.Process", lambda: box.exec("true")),
    ):
        proxy.refuse(part, *[_json(status, "no such machine")] * 3)
        with pytest.raises(SandboxGoneError):
            await call()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (_json(401, "the key has expired"), SandboxRefusesError),
        (_json(402, "the quota is used up"), SandboxRefusesError),
        (_json(403, "the team is blocked"), SandboxRefusesError),
        (_json(404, "template 'x' not found"), UnknownImageError),
        (_json(400, "the timeout is too long"), ConfigError),
        ((404, "text/plain", b"default backend - 404"), SandboxBusyError),
        ((403, "text/html", _HTML), SandboxBusyError),
        ((200, "text/html", _HTML), SandboxBusyError),
        ((201, "application/json", b'{"sandboxID": "s'), SandboxBusyError),
        ((201, "application/json", b"{}"), SandboxBusyError),
        ((500, "text/html", _HTML), SandboxBusyError),
        ((504, "application/json", b"\xff\xfe\x00"), SandboxBusyError),
    ],
)
async def test_an_answer_to_the_create_call(
    proxy: Proxy, behind: E2BProvider, answer: tuple[int, str, bytes], expected: type[Exception]
) -> None:
    proxy.refuse("POST ", answer, answer)  # of the SDK's route and of the older one
    with pytest.raises(expected) as raised:
        box = await behind.create("host", ttl_seconds=60, metadata={}, idempotency_key=uuid.uuid4().hex)
        await box.kill()
    assert issubclass(expected, ConfigError) == isinstance(raised.value, ConfigError)


@pytest.mark.parametrize("answer", [_json(401, "expired"), (500, "text/html", _HTML), (404, "text/html", _HTML)])
async def test_other_calls_of_the_service_wait(
    proxy: Proxy, behind: E2BProvider, answer: tuple[int, str, bytes]
) -> None:
    box = await make_box(behind)
    try:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: box.set_ttl(60),
            lambda: behind.kill(box.id),
            lambda: behind.list({}),
            lambda: behind.connect(box.id),
        ]
        for call in calls:
            proxy.refuse("/sandboxes", answer)
            with pytest.raises(SandboxBusyError):
                await call()
    finally:
        proxy.refuse("")
        await box.kill()
