"""A sandbox as a person ports one: a class with `exec`, `write_file`, `read_file` and `async with`, and nothing else.

Its boxes are directories of this machine, without isolation beyond that. LocalBox is what docs/sandboxes.md promises to
be enough; ReattachedBox has one method more.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

from ratchet import paths
from sandbox_gateway.python_layer import ensure_python_layer

_PASSWD = "root:x:0:0::/root:/bin/bash\nagent:x:54321:54321::/home/agent:/bin/bash\n"


class LocalBox:
    def __init__(self, image: str) -> None:
        self.image = image

    async def __aenter__(self) -> Self:
        self.root = Path(tempfile.mkdtemp(prefix="local-box-"))
        for name in ("etc", "root", "home/agent", "tmp", "var/tmp", "run", "workspace", "opt", "usr", "dev", "proc"):
            (self.root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.root / name).symlink_to(f"usr/{name}")
        (self.root / "etc/passwd").write_text(_PASSWD)
        (self.root / "etc/group").write_text("root:x:0:\nagent:x:54321:\n")
        for name in ("tmp", "var/tmp"):
            (self.root / name).chmod(0o1777)
        self.root.chmod(0o755)
        shutil.chown(self.root / "home/agent", 54321, 54321)
        return self

    async def __aexit__(self, *error: object) -> None:
        shutil.rmtree(self.root)

    async def exec(
        self, cmd: str, *, user: str = "root", check: bool = True, timeout: float = 60, data: bytes | None = None
    ) -> tuple[int, bytes, bytes]:
        layer = ensure_python_layer(paths.cache())
        command = f"bwrap --bind {self.root} / --ro-bind /usr /usr --dev-bind /dev /dev --proc /proc".split()
        home = "/root" if user == "root" else f"/home/{user}"
        command += ["--ro-bind", str(layer), "/opt/ratchet", "--clearenv", "--setenv", "HOME", home, "--chdir", home]
        command += [*f"setpriv --reuid={user} --regid={user} --init-groups /bin/bash -l -c".split(), cmd]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate(data)
        finally:
            process._transport.close()  # type: ignore[attr-defined]  # it may run on, and its pipes are open
        return process.returncode or 0, stdout, stderr

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        data = content.read_bytes() if isinstance(content, Path) else content
        raw = data.encode() if isinstance(data, str) else data
        await self.exec(f'mkdir -p "$(dirname {path})" && cat > {path}', user=user, data=raw)

    async def read_file(self, path: str, *, user: str = "root") -> bytes:
        return (await self.exec(f"cat {path}", user=user))[1]


class ReattachedBox(LocalBox):
    """One method more: a worker that takes over finds the box again."""

    @property
    def sandbox_id(self) -> str:
        return str(self.root)

    @classmethod
    def connect(cls, box_id: str) -> Any:
        box = cls("host")
        box.root = Path(box_id)
        if not box.root.is_dir():
            raise LookupError(f"there is no box {box_id}")
        return box
