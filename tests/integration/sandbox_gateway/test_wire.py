"""The gateway's answers to bad input, below the SDK: always a refusal that names the mistake, never a 500."""

import gzip
import json
import struct
from typing import Any

import pytest

from tests.integration.sandbox_gateway.conftest import GatewayProcess

_UNKNOWN = "i" + "0" * 20


def _envelope(message: object) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data


def _last_envelope(body: bytes) -> dict[str, Any]:
    last: dict[str, Any] = {}
    while body:
        _flag, length = struct.unpack_from(">BI", body)
        last, body = json.loads(body[5 : 5 + length]), body[5 + length :]
    return last


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"\xff\xfe", 400),
        (b"{}", 400),
        (b'{"templateID": 3}', 400),
        (b'{"templateID": "base", "timeout": -1}', 400),
        (b'{"templateID": "base", "timeout": "5"}', 400),
        (b'{"templateID": "base", "timeout": true}', 400),
        (b'{"templateID": "base", "timeout": 999999999}', 400),
        (b'{"templateID": "base", "metadata": {"a": 1}}', 400),
        (b'{"templateID": "base", "metadata": []}', 400),
        (b'{"templateID": "base", "envVars": {"A=B": "x"}}', 400),
        (b'{"templateID": "base", "envVars": {"A": "x\\u0000"}}', 400),
        (b'{"templateID": "base", "allow_internet_access": true}', 400),
        (b'{"templateID": "base", "mcp": {"x": {}}}', 400),
        (b'{"templateID": "base", "volumeMounts": [{}]}', 400),
        (b'{"templateID": "nope"}', 404),
        (b'{"templateID": "../../etc"}', 404),
        (b'{"templateID": "base", "metadata": {"image": "nope"}}', 404),
        (b"x" * (65 << 20), 413),
    ],
)
def test_bad_create(gateway: GatewayProcess, body: bytes, status: int) -> None:
    answer = gateway.call("POST", "/v2/sandboxes", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["code"] == status and isinstance(answer.json()["message"], str)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"/sandboxes/{_UNKNOWN}", 404),
        ("GET", "/sandboxes/..%2f..%2fetc", 404),
        ("GET", "/sandboxes/%00", 404),
        ("DELETE", f"/sandboxes/{_UNKNOWN}", 404),
        ("POST", f"/sandboxes/{_UNKNOWN}/timeout", 404),
        ("POST", f"/v2/sandboxes/{_UNKNOWN}/connect", 404),
        ("POST", f"/sandboxes/{_UNKNOWN}/pause", 404),
        ("GET", "/v2/sandboxes?limit=x", 400),
        ("GET", "/v2/sandboxes?nextToken=-1", 400),
        ("GET", "/nothing", 404),
        ("PUT", "/sandboxes", 405),
    ],
)
def test_bad_control_calls(gateway: GatewayProcess, method: str, path: str, status: int) -> None:
    assert gateway.call(method, path).status_code == status


@pytest.mark.parametrize("key", ["", "wrong", "\u00e9"])
def test_wrong_api_key(gateway: GatewayProcess, key: str) -> None:
    answer = gateway.call("GET", "/v2/sandboxes", headers={"X-API-KEY": key.encode("latin-1")})
    assert answer.status_code == 401


def test_bad_timeouts(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    for body in ({"timeout": -1}, {"timeout": 10**9}, {"timeout": 1.5}, {"timeout": "x"}):
        assert gateway.call("POST", f"/sandboxes/{raw_box['sandboxID']}/timeout", json=body).status_code == 400


@pytest.mark.parametrize("box_id", [_UNKNOWN, "../x", "", "i" * 3000])
def test_an_unknown_box_was_not_found(gateway: GatewayProcess, box_id: str) -> None:
    answer = gateway.call("GET", "/health", headers={"E2b-Sandbox-Id": box_id})
    assert answer.status_code == 502 and "was not found" in answer.json()["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("path=/missing", 404),
        ("path=%00", 400),
        ("path=/tmp/a%00b", 400),
        ("path=", 400),
        ("", 400),
        ("path=/tmp", 400),
        ("path=/tmp/fifo", 400),
        ("path=/dev/zero", 400),
        ("path=/tmp/loop", 400),
        ("path=~nobody/x", 400),
        ("path=/" + "x" * 300, 400),
        ("path=/tmp/plain/below", 404),
        ("path=/tmp/plain&username=ghost", 401),
        ("path=/tmp/plain&username=a%00b", 401),
    ],
)
def test_bad_reads(gateway: GatewayProcess, odd_files: dict[str, Any], path: str, status: int) -> None:
    answer = gateway.call_box(odd_files, "GET", f"/files?{path}")
    assert answer.status_code == status, answer.text


@pytest.fixture(scope="module")
def odd_files(gateway: GatewayProcess) -> Any:
    box = gateway.call("POST", "/v2/sandboxes", json={"templateID": "base"}).json()
    script = "mkfifo /tmp/fifo; ln -s loop /tmp/loop; echo x > /tmp/plain; ln -s /proc/1/root/etc/shadow /tmp/escape"
    message = _envelope({"process": {"cmd": "/bin/bash", "args": ["-c", script]}, "stdin": False})
    gateway.call_box(
        box, "POST", "/process.Process/Start", content=message, headers={"Content-Type": "application/connect+json"}
    )
    yield box
    gateway.call("DELETE", f"/sandboxes/{box['sandboxID']}")


@pytest.mark.parametrize(
    ("query", "headers", "body", "status"),
    [
        ("path=/tmp/w", {"Content-Type": "text/plain"}, b"x", 400),
        ("path=/tmp/w", {}, b"x", 400),
        ("path=/tmp/w", {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, b"not gzip", 400),
        (
            "path=/tmp/w",
            {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
            gzip.compress(b"x" * 99, mtime=0)[:-9],
            400,
        ),
        ("path=/tmp/w", {"Content-Type": "application/octet-stream", "Content-Encoding": "br"}, b"x", 400),
        ("", {"Content-Type": "application/octet-stream"}, b"x", 400),
        ("path=/tmp", {"Content-Type": "application/octet-stream"}, b"x", 400),
        ("path=/tmp/plain/below", {"Content-Type": "application/octet-stream"}, b"x", 400),
        ("path=/tmp/loop", {"Content-Type": "application/octet-stream"}, b"x", 400),
        ("path=/usr/w", {"Content-Type": "application/octet-stream"}, b"x", 403),
        ("path=/tmp/w", {"Content-Type": "multipart/form-data"}, b"x", 400),
        ("path=/tmp/w", {"Content-Type": "multipart/form-data; boundary=b"}, b"nonsense", 400),
        (
            "path=/tmp/w",
            {"Content-Type": "multipart/form-data; boundary=b"},
            b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\nx",
            400,
        ),
    ],
)
def test_bad_writes(
    gateway: GatewayProcess, odd_files: dict[str, Any], query: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = gateway.call_box(odd_files, "POST", f"/files?{query}", content=body, headers=headers)
    assert answer.status_code == status, answer.text


def test_a_gzip_upload_is_unpacked(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    data = b"squeeze me " * 100_000
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    assert (
        gateway.call_box(
            raw_box, "POST", "/files?path=/tmp/z", content=gzip.compress(data), headers=headers
        ).status_code
        == 200
    )
    assert gateway.call_box(raw_box, "GET", "/files?path=/tmp/z").content == data


def test_wrong_access_token(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    for token in ("", "x", API_KEY_LIKE):
        answer = gateway.call_box(raw_box, "GET", "/files?path=/etc/passwd", headers={"X-Access-Token": token})
        assert answer.status_code == 401


API_KEY_LIKE = "e2b_" + "0" * 40


@pytest.mark.parametrize(
    ("method", "body", "code"),
    [
        ("process.Process/SendSignal", {"process": {"pid": 99_999}, "signal": "SIGNAL_SIGKILL"}, "not_found"),
        ("process.Process/SendSignal", {"process": {"pid": "x"}, "signal": "SIGNAL_SIGKILL"}, "invalid_argument"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_NONE"}, "invalid_argument"),
        ("process.Process/SendInput", {"process": {"pid": 99_999}, "input": {"stdin": "eA=="}}, "not_found"),
        ("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "%%"}}, "invalid_argument"),
        ("process.Process/CloseStdin", {}, "invalid_argument"),
        ("process.Process/Update", {}, "invalid_argument"),
        ("process.Process/Update", {"process": {"pid": 99_999}, "pty": {"size": {"rows": 1, "cols": 1}}}, "not_found"),
        ("filesystem.Filesystem/WatchDir", {}, "unimplemented"),
        ("filesystem.Filesystem/Stat", {"path": "/missing"}, "not_found"),
        ("filesystem.Filesystem/Stat", {"path": "a\0b"}, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": 5}, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": "\ud800"}, "invalid_argument"),
        ("filesystem.Filesystem/ListDir", {"path": "/tmp/loop"}, "failed_precondition"),
        ("filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, "invalid_argument"),
        ("filesystem.Filesystem/ListDir", {"path": "/", "depth": 10**9}, "invalid_argument"),
        ("filesystem.Filesystem/MakeDir", {"path": "/tmp"}, "already_exists"),
        ("filesystem.Filesystem/Remove", {"path": "/"}, "invalid_argument"),
        ("filesystem.Filesystem/Move", {"source": "/missing", "destination": "/tmp/m"}, "not_found"),
        ("filesystem.Filesystem/Move", {"source": "/tmp"}, "invalid_argument"),
    ],
)
def test_bad_unary_calls(
    gateway: GatewayProcess, odd_files: dict[str, Any], method: str, body: dict[str, Any], code: str
) -> None:
    answer = gateway.call_box(
        odd_files, "POST", f"/{method}", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.json()["code"] == code, answer.text
    assert answer.status_code != 500


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0\0\0\0\xffx", "invalid_argument"),
        (b"\1\0\0\0\2{}", "invalid_argument"),
        (_envelope([]), "invalid_argument"),
        (_envelope({"process": {}}), "invalid_argument"),
        (_envelope({"process": {"cmd": ""}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "a\0b"}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "/no/such/program"}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "/bin/true", "cwd": "/missing"}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "/bin/true", "args": ["x" * 140_000]}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "/bin/true", "envs": {"A": 1}}}), "invalid_argument"),
        (_envelope({"process": {"cmd": "/bin/true"}, "pty": {"size": {"rows": -1, "cols": 80}}}), "invalid_argument"),
    ],
)
def test_bad_starts(gateway: GatewayProcess, odd_files: dict[str, Any], message: bytes, code: str) -> None:
    headers = {"Content-Type": "application/connect+json"}
    answer = gateway.call_box(odd_files, "POST", "/process.Process/Start", content=message, headers=headers)
    assert answer.status_code == 200 and _last_envelope(answer.content)["error"]["code"] == code, answer.text


def test_wrong_content_types(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    for method in ("process.Process/Start", "process.Process/List"):
        assert (
            gateway.call_box(
                raw_box, "POST", f"/{method}", content=b"{}", headers={"Content-Type": "text/plain"}
            ).status_code
            == 415
        )


def test_symlinks_stay_inside(gateway: GatewayProcess, odd_files: dict[str, Any]) -> None:
    assert b"agent:*" in gateway.call_box(odd_files, "GET", "/files?path=/tmp/escape").content


async def test_stdin(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    from e2b import AsyncSandbox

    box = await AsyncSandbox.connect(
        raw_box["sandboxID"], api_key=API_KEY_LIKE, api_url=gateway.url, sandbox_url=gateway.url
    )
    handle = await box.commands.run("cat; echo end", background=True, stdin=True)
    await box.commands.send_stdin(handle.pid, "hello\n" * 50_000)
    assert [process.pid for process in await box.commands.list()] == [handle.pid]
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "hello\n" * 50_000 + "end\n"


async def test_file_system_calls_of_the_sdk(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    from e2b import AsyncSandbox

    box = await AsyncSandbox.connect(
        raw_box["sandboxID"], api_key=API_KEY_LIKE, api_url=gateway.url, sandbox_url=gateway.url
    )
    assert await box.files.make_dir("/tmp/d/e") and not await box.files.make_dir("/tmp/d/e")
    await box.files.write("/tmp/d/f", "x")
    await box.files.rename("/tmp/d/f", "/tmp/d/e/g")
    assert [entry.path for entry in await box.files.list("/tmp/d", depth=2)] == ["/tmp/d/e", "/tmp/d/e/g"]
    assert (await box.files.get_info("/tmp/d/e/g")).size == 1
    await box.files.remove("/tmp/d")
    assert not await box.files.exists("/tmp/d")
    assert await box.is_running()


def test_a_full_gateway_says_when_to_come_back(own_gateway: GatewayProcess) -> None:
    answers = [
        own_gateway.call("POST", "/v2/sandboxes", json={"templateID": "base"})
        for _ in range(own_gateway.settings.max_boxes + 1)
    ]
    assert [answer.status_code for answer in answers] == [201] * own_gateway.settings.max_boxes + [503]
    assert int(answers[-1].headers["retry-after"]) > 0


UNSUPPORTED = "not supported by the local gateway"


@pytest.mark.parametrize(
    ("method", "operation"),
    [("POST", "snapshots"), ("POST", "fork"), ("PUT", "network"), ("GET", "logs"), ("DELETE", "some/thing")],
)
def test_missing_operations_of_a_live_box_are_refused_by_name(
    gateway: GatewayProcess, raw_box: dict[str, Any], method: str, operation: str
) -> None:
    for prefix in ("", "/v2"):
        answer = gateway.call(method, f"{prefix}/sandboxes/{raw_box['sandboxID']}/{operation}", json={})
        assert answer.status_code == 501
        assert answer.json()["message"].startswith(f"{UNSUPPORTED}: {operation} of a sandbox; ")
        assert gateway.call(method, f"{prefix}/sandboxes/{_UNKNOWN}/{operation}", json={}).status_code == 404
    missing = gateway.call("GET", "/templates")
    assert missing.status_code == 404 and missing.json()["message"].startswith(f"{UNSUPPORTED}: GET /templates; ")


async def test_missing_operations_by_the_sdk(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    from e2b import AsyncSandbox, SandboxException

    options = {"api_key": API_KEY_LIKE, "api_url": gateway.url, "sandbox_url": gateway.url}
    box = await AsyncSandbox.connect(raw_box["sandboxID"], **options)
    for call in (box.create_snapshot(), box.fork(), box.update_network({"allow_out": ["1.1.1.1"]})):
        with pytest.raises(SandboxException, match=UNSUPPORTED):
            await call
    with pytest.raises(Exception, match=UNSUPPORTED):
        await box.files.watch_dir("/tmp", lambda event: None)
    assert (await box.commands.run("whoami; pwd", user="user")).stdout == "agent\n/home/agent\n"


def test_a_box_may_be_asked_to_reach_what_it_reaches_anyway(gateway: GatewayProcess) -> None:
    for network, status in (
        ({"allowOut": ["127.0.0.1"], "denyOut": ["0.0.0.0/0"]}, 201),
        ({"denyOut": ["0.0.0.0/0"]}, 201),
        ({"allowOut": ["127.0.0.1"]}, 400),
        ({"allowOut": ["1.1.1.1"], "denyOut": ["0.0.0.0/0"]}, 400),
        ({"denyOut": ["0.0.0.0/0"], "egressProxy": {}}, 400),
        (["0.0.0.0/0"], 400),
        ({"allowOut": "127.0.0.1", "denyOut": 5}, 400),
    ):
        answer = gateway.call("POST", "/v2/sandboxes", json={"templateID": "base", "network": network})
        assert answer.status_code == status, (network, answer.text)
        if status == 201:
            gateway.call("DELETE", f"/sandboxes/{answer.json()['sandboxID']}")
        else:
            assert answer.json()["message"].startswith(f"{UNSUPPORTED}: network; ")


def test_a_websocket_to_a_boxs_port_is_refused_in_words(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    headers = {
        "Host": f"8000-{raw_box['sandboxID']}.localhost", "Connection": "Upgrade", "Upgrade": "websocket",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version": "13",
    }  # fmt: skip
    answer = gateway.call("GET", "/socket", headers=headers)
    assert answer.status_code == 501 and answer.json()["message"].startswith(f"{UNSUPPORTED}: an upgraded connection")


def test_the_code_interpreter_is_refused_in_words(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    """Its SDK reads the usual answer about a closed port, a 502, as a time-out of the box."""
    answer = gateway.call("POST", "/execute", headers={"Host": f"49999-{raw_box['sandboxID']}.localhost"}, json={})
    assert answer.status_code == 501 and answer.json()["message"].startswith(f"{UNSUPPORTED}: the code interpreter")
