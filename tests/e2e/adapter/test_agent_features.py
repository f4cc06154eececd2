"""What agents use beside text and shell, with the unmodified programs: images, namespaces of tools, sub-agents.

Each is an act of the policy; none may end the rollout. A test is skipped if the program cannot be fetched.
"""

from pathlib import Path

import pytest

from ratchet.types import AgentExit
from tests.e2e.adapter.conftest import CLAUDE_CODE, CODEX, Cli, Testbed, call, start
from tests.e2e.adapter.test_real_clients import num_trained, read_end

pytestmark = pytest.mark.timeout(3000)
PICTURE = "import sys, zlib, struct\n" + (
    "number = lambda value: struct.pack('>I', value)\n"
    "chunk = lambda kind, data: number(len(data)) + kind + data + number(zlib.crc32(kind + data))\n"
    "pixels = zlib.compress((b'\\0' + b'\\xff\\0\\0' * 31) * 7)\n"
    "head = struct.pack('>IIBBBBB', 31, 7, 8, 2, 0, 0, 0)\n"
    "png = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', head) + chunk(b'IDAT', pixels) + chunk(b'IEND', b'')\n"
    "open('a.png', 'wb').write(png)"
)


@pytest.mark.parametrize(("cli", "view"), [(CLAUDE_CODE, "Read"), (CODEX, "view_image")], ids=["claude_code", "codex"])
async def test_an_image_does_not_end_the_rollout(cli: Cli, view: str, testbed: Testbed, directory: Path) -> None:
    opened = await testbed.open()
    path = directory / "repo" / "a.png"
    argument = "file_path" if view == "Read" else "path"
    script = f"python3 - <<'PY'\n{PICTURE}\nPY"
    await testbed.engine.say(cli.call(script), call(view, **{argument: str(path)}), "It is red.")
    running = start(cli, testbed.address, opened.token, directory)
    events = await running.end()
    rows = await testbed.rows(opened)
    assert path.is_file() and read_end(cli, running) is AgentExit.DONE, events[-3:]
    last = (await testbed.engine.seen())["calls"][-1]["ids"]
    assert "[image, 31x7, omitted]" in testbed.engine.renderer.tokenizer.decode(last), events[-3:]
    assert [row.fork_cause for row in rows] == ["root", None, None]
    assert await num_trained(opened) == [sum(row.num_sampled for row in rows)]
