"""A box on the host: the harness's own commands, with a temporary folder instead of /run/ratchet.

The launcher's protocol concerns processes and signals and needs no sandbox. The tests need root, because the agent runs
as a user of its own.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from activities.harnesses.launcher import RUN_DIR
from ratchet.errors import CommandFailedError
from sandboxes.base import CommandResult


@dataclass
class HostBox:
    """Implements the part of `Sandbox` that harnesses use. `commands`: what was run. `env`: extra environment
    variables."""

    root: Path
    env: dict[str, str]
    commands: list[str] = field(default_factory=list)
    id: str = "host"

    def here(self, text: str) -> str:
        return text.replace(RUN_DIR, f"{self.root}/run")

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        check: bool = True,
        timeout: float | None = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> CommandResult:
        self.commands.append(cmd)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self.here(cmd), stdout=pipe, stderr=pipe, env=self.env, cwd=cwd
        )
        stdout, stderr = await asyncio.wait_for(process.communicate(), timeout)
        result = CommandResult(process.returncode or 0, stdout.decode(), stderr.decode())
        if check and result.exit_code:
            raise CommandFailedError(cmd, result.exit_code, result.stdout, result.stderr)
        return result

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        assert isinstance(content, bytes)
        target = Path(self.here(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        with Path(self.here(path)).open("rb") as file:
            return file.read(max_bytes)

    async def set_ttl(self, seconds: int) -> None: ...

    async def kill(self) -> None: ...

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@pytest.fixture
def host_box() -> Iterator[HostBox]:
    if os.getuid() != 0:
        pytest.skip("the launcher changes to the agent's user, which takes root")
    root = Path(tempfile.mkdtemp(prefix="ratchet-harness-"))  # not tmp_path: the agent's user must be able to enter it
    root.chmod(0o755)
    yield HostBox(root, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "RATCHET_RUN_DIR": f"{root}/run"})
    shutil.rmtree(root)


@pytest.fixture
def agent_user() -> str:
    """Return a user id that no other test process has, because the launcher ends all processes of that user."""
    return str(1_500_000_000 + os.getpid())
