"""The gateway answers as E2B's own envd does, but for the differences that `envd_answers.json` lists with their reason.

The calls are made by the SDK; what envd answered to them is recorded there.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox, CommandExitException
from e2b.sandbox.commands.command_handle import PtySize

from sandboxes.base import Sandbox
from tests.integration.sandbox_gateway.conftest import API_KEY, GatewayProcess

ANSWERS = json.loads(Path(__file__).with_name("envd_answers.json").read_text())
D = "/workspace/t"
CASES: dict[str, Callable[[AsyncSandbox], Awaitable[Any]]] = {}


async def told(call: Awaitable[Any]) -> Any:
    """Return what a call tells: its result or the name of its exception, without paths and words."""
    try:
        result = await call
    except CommandExitException as ended:
        result = ended
    except Exception as error:
        return type(error).__name__
    if hasattr(result, "exit_code"):
        return [result.exit_code, result.stdout, result.stderr]
    return "ok" if result is None or hasattr(result, "path") or isinstance(result, list) else result


def case(name: str) -> Callable[[Callable[[AsyncSandbox], Awaitable[Any]]], None]:
    def add(function: Callable[[AsyncSandbox], Awaitable[Any]]) -> None:
        CASES[name] = function

    return add


async def sh(box: AsyncSandbox, command: str, user: str = "root", **options: Any) -> Any:
    return await told(box.commands.run(command, user=user, **{"timeout": 20, **options}))


async def shown(box: AsyncSandbox, command: str) -> str:
    return " ".join((await box.commands.run(command, user="root")).stdout.split())


async def write(box: AsyncSandbox, path: str, data: str = "x", user: str = "root", before: str = "true") -> Any:
    await box.commands.run(f"cd {D} && {before}", user="root")
    path = path if path.startswith("/") or user == "agent" else f"{D}/{path}"
    return await told(asyncio.wait_for(box.files.write(path, data, user=user), 10))


def written(name: str, path: str, before: str = "true", user: str = "root") -> None:
    @case(name)
    async def _(box: AsyncSandbox) -> Any:
        return await write(box, path, before=before, user=user)


def ran(name: str, command: str, **options: Any) -> None:
    @case(name)
    async def _(box: AsyncSandbox) -> Any:
        return await sh(box, command, **options)


@case("write relative as a user")
async def _(box: AsyncSandbox) -> Any:
    return [await write(box, "rel/x", user="agent"), await shown(box, "stat -c '%U:%G %a' /home/agent/rel{,/x}")]


@case("write over another's file")
async def _(box: AsyncSandbox) -> Any:
    first = await write(box, f"{D}/o", "2", user="agent", before="echo 1 > o; chmod 755 o")
    return [first, await shown(box, f"stat -c '%U:%G %a' {D}/o; cat {D}/o")]


@case("write over a read-only file")
async def _(box: AsyncSandbox) -> Any:
    first = await write(box, f"{D}/ro", user="agent", before="echo s > ro; chmod 400 ro")
    return [first, await shown(box, f"stat -c '%U %a' {D}/ro; cat {D}/ro")]


@case("write through a link")
async def _(box: AsyncSandbox) -> Any:
    return [await write(box, "ln", "new", before="ln -s tgt ln"), await shown(box, f"stat -c %F {D}/ln; cat {D}/tgt")]


@case("write below a dangling link")
async def _(box: AsyncSandbox) -> Any:
    return [await write(box, "dl", "new", before="ln -s nowhere dl"), await shown(box, f"cat {D}/nowhere")]


@case("write odd names")
async def _(box: AsyncSandbox) -> Any:
    names = ANSWERS["write odd names"]["envd"]
    for name in names:
        await box.files.write(f"{D}/{name}", name, user="root")
    return [await box.files.read(f"{D}/{name}", user="root") for name in names]


@case("write one path twice")
async def _(box: AsyncSandbox) -> Any:
    files: Any = [{"path": f"{D}/same", "data": data} for data in ("1", "2")]
    return [await told(box.files.write_files(files, user="root")), await box.files.read(f"{D}/same", user="root")]


written("write to a directory", "dir", "mkdir dir")
written("write to a new directory", "ts/")
written("write below a file", "f/x", "touch f")
written("write a name of 256 bytes", "n" * 256)
written("write a link loop", "l1", "ln -s l2 l1; ln -s l1 l2")
written(
    "write a running program",
    "slp",
    "cp /bin/sleep slp; ./slp 60 >/dev/null 2>&1 & until readlink /proc/$!/exe | grep -q slp; do sleep 0.1; done",
)
written("write a pipe", "ff", "mkfifo ff")
written("write /dev/null", "/dev/null")
written("write as an unknown user", f"{D}/u", user="nobody-here")
written("write as a number", f"{D}/u", user="1000")


@case("read a missing file")
async def _(box: AsyncSandbox) -> Any:
    return await told(box.files.read(f"{D}/no", user="root"))


@case("read a directory")
async def _(box: AsyncSandbox) -> Any:
    return await told(box.files.read(D, user="root"))


@case("read /proc/version")
async def _(box: AsyncSandbox) -> Any:
    return "Linux version" in await box.files.read("/proc/version", user="root")


@case("read a pipe")
async def _(box: AsyncSandbox) -> Any:
    await sh(box, f"mkfifo {D}/ff")
    return await told(asyncio.wait_for(box.files.read(f"{D}/ff", user="root"), 3))


@case("list two levels")
async def _(box: AsyncSandbox) -> Any:
    await sh(box, f"cd {D} && mkdir -p dir/deep && touch .hidden file dir/sub dir/deep/z")
    return [entry.path.removeprefix(f"{D}/") for entry in await box.files.list(D, depth=2, user="root")]


@case("list far down")
async def _(box: AsyncSandbox) -> Any:
    await sh(box, f"mkdir -p {D}/a/b/c")
    return len(await box.files.list(D, depth=1000, user="root"))


@case("make a directory twice")
async def _(box: AsyncSandbox) -> Any:
    return [await told(box.files.make_dir(f"{D}/m/n", user="root")) for _ in range(2)]


ran("output and exit code", "echo out; echo err >&2; exit 3")
ran("an early close of stdout", "echo x; exec 1>&- 2>&-; sleep 0.5; exit 5")
ran("/dev/stdout", "echo x > /dev/stdout; echo y > /dev/stderr; echo z > /proc/self/fd/1")
ran("a late child that redirects", "sleep 9 >/dev/null 2>&1 & echo started")
ran("a late child that prints soon", "(sleep 0.4; echo late) & echo first")
ran("cwd missing", "pwd", cwd="/not/there")
ran("cwd of the home", "pwd", cwd="~", user="agent")
ran("cwd relative", "pwd", cwd="relc", user="agent")
ran("cwd that the user may not enter", "pwd", cwd=f"{D}/closed", user="agent")
ran("an unknown user", "id", user="nobody-here")
ran("a time limit", "echo begun; sleep 30", timeout=1)
ran(
    "environment",
    'printf "%s|" "$A" "$EMPTY" "$UNI" "$NL"; printf %s "$HOME"',
    envs={"A": "x y", "EMPTY": "", "UNI": "ü", "NL": "a\nb", "HOME": "/tmp"},
)


@case("a missing program")
async def _(box: AsyncSandbox) -> Any:
    return (await sh(box, "no-such-program"))[0]


@case("ended by a signal")
async def _(box: AsyncSandbox) -> Any:
    found = []
    for name in ("KILL", "TERM", "USR1"):
        with pytest.raises(CommandExitException) as ended:
            await box.commands.run(f"kill -{name} $$; sleep 1", user="root")
        found.append(ended.value.error)
    return found


async def with_input(box: AsyncSandbox, command: str, data: bytes) -> Any:
    handle = await box.commands.run(command, background=True, stdin=True, user="root", timeout=30)
    await handle.send_stdin(data)
    await handle.close_stdin()
    return await told(handle.wait())


@case("stdin")
async def _(box: AsyncSandbox) -> Any:
    return await with_input(box, "cat", b"abc\n")


@case("9 MB of stdin")
async def _(box: AsyncSandbox) -> Any:
    return await with_input(box, "wc -c", b"y" * (9 << 20))


@case("stdin of nobody")
async def _(box: AsyncSandbox) -> Any:
    return await told(box.commands.send_stdin(999_999, "x"))


@case("two listeners")
async def _(box: AsyncSandbox) -> Any:
    handle = await box.commands.run("sleep 0.5; exit 2", background=True, user="root")
    second = await box.commands.connect(handle.pid)
    return [(await told(one.wait()))[0] for one in (handle, second)]


@case("a listener of one second")
async def _(box: AsyncSandbox) -> Any:
    handle = await box.commands.run("sleep 2.5; echo fin", background=True, user="root", timeout=30)
    second = await box.commands.connect(handle.pid, timeout=1)
    return [await told(one.wait()) for one in (second, handle)]


@case("a listener who comes late")
async def _(box: AsyncSandbox) -> Any:
    handle = await box.commands.run("echo early; sleep 2; echo late", background=True, user="root")
    await asyncio.sleep(0.5)
    return await told((await box.commands.connect(handle.pid)).wait())


@case("what a time limit ends")
async def _(box: AsyncSandbox) -> Any:
    await sh(box, "sleep 8881 & (sleep 8882; true); true", timeout=1)
    return int(await shown(box, "sleep 0.5; pgrep -fxc 'sleep 888[12]' || true"))


@case("kill")
async def _(box: AsyncSandbox) -> Any:
    handle = await box.commands.run("sleep 60", background=True, user="root")
    first = await handle.kill()
    await told(handle.wait())
    return [first, await handle.kill()]


@case("a terminal without a size")
async def _(box: AsyncSandbox) -> Any:
    terminal = await box.pty.create(PtySize(rows=0, cols=0), on_data=lambda _: None, user="root")
    await terminal.kill()
    return "created"


@pytest.fixture(scope="module")
async def sdk(gateway: GatewayProcess, shared_box: Sandbox) -> AsyncIterator[AsyncSandbox]:
    yield await AsyncSandbox.connect(shared_box.id, api_key=API_KEY, api_url=gateway.url, sandbox_url=gateway.url)


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "about"])
async def test_answer(sdk: AsyncSandbox, name: str) -> None:
    setup = f"rm -rf {D} /home/agent/rel; mkdir -p {D}/closed /home/agent/relc; chmod 700 {D}/closed"
    await sdk.commands.run(setup + (f"; rmdir {D}/closed" if "list" in name else ""), user="root")
    answer = ANSWERS[name]
    assert await CASES[name](sdk) == answer.get("ours", answer["envd"])


OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33, which no program may set; some parents of this process leave them ignored."""


async def test_a_command_of_any_user_opens_its_output_and_ignores_no_signal(sdk: AsyncSandbox) -> None:
    for user in ("root", "agent"):
        assert await sh(sdk, "echo x > /dev/stdout; echo y > /dev/stderr", user) == [0, "x\n", "y\n"]
        code, masks, _ = await sh(sdk, "grep -E '^Sig(Ign|Blk)' /proc/self/status", user)
        found = [int(line.split()[1], 16) & ~OF_THE_C_LIBRARY for line in masks.splitlines()]
        assert (code, found) == (0, [0, 0]), masks


async def test_output_that_a_child_holds_open_is_not_lost_without_a_word(sdk: AsyncSandbox) -> None:
    code, stdout, stderr = await sh(sdk, "(sleep 3; echo late) & echo first")
    assert (code, stdout) == (0, "first\n") and "redirect" in stderr


async def test_a_user_without_a_home_starts_at_the_root(sdk: AsyncSandbox) -> None:
    await sdk.commands.run("mv /home/agent /home/away", user="root")
    try:
        for cwd in (None, "~"):
            assert await sh(sdk, "pwd; id -un", "agent", cwd=cwd) == [0, "/\nagent\n", ""]
    finally:
        await sdk.commands.run("mv /home/away /home/agent", user="root")
