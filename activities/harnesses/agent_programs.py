"""The agent programs that are fetched: their pinned versions, and how they get into a box.

A box sees a program at `/opt/agents/<name>-<release>/bin/<command>`: the local gateway mounts it, a template contains
it, or `ensure_program` uploads it. The host keeps the same directory below `~/.cache/ratchet/agents`.
"""

import asyncio
import hashlib
import json
import os
import shlex
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet import paths
from ratchet.errors import ConfigError
from ratchet.vime_names import value_of
from sandboxes.base import Sandbox

BOX_AGENTS = "/opt/agents"
RECORD = "agent.json"
"""File beside `bin` with {"version", "source"}, written last, so that its presence means a complete program."""
NODE_VERSION = "22.23.3"
"""Node.js for programs that are scripts, from npm, unless the environment names another."""
_UNPACK_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A program. `release` names its directory: the pinned version, or the digest of a tarball of the environment."""

    name: str
    command: str
    pinned: str
    release: str
    tarball: Path | None = None
    node_tarball: Path | None = None

    @property
    def directory_name(self) -> str:
        return f"{self.name}-{self.release}"

    @property
    def host_directory(self) -> Path:
        return agents_directory() / self.directory_name

    @property
    def box_path(self) -> str:
        return f"{BOX_AGENTS}/{self.directory_name}/bin/{self.command}"

    @property
    def version(self) -> str:
        """The version that the program's package states; the pinned one if the program is not on this machine."""
        record = self.host_directory / RECORD
        return str(json.loads(record.read_text())["version"]) if record.is_file() else self.pinned


def agents_directory() -> Path:
    """Return the host's directory of agent programs."""
    return paths.cache() / "agents"


def claude_code_program(environment: Mapping[str, str] = os.environ) -> AgentProgram:
    """Return Claude Code, or the tarball that VIME_AGENT_CC_TARBALL names.

    VIME_AGENT_NODE_TARBALL names the Node.js for a tarball that is not a native program; without it npm's is fetched.
    """
    return _program(
        "claude_code",
        "claude",
        "2.1.329",
        value_of("VIME_AGENT_CC_TARBALL", environment),
        value_of("VIME_AGENT_NODE_TARBALL", environment),
    )


PROGRAMS: dict[str, Callable[[], AgentProgram]] = {
    "claude_code": claude_code_program,
    "codex": lambda: _program("codex", "codex", "0.169.0", os.environ.get("RATCHET_CODEX_TARBALL"), None),
    "opencode": lambda: AgentProgram("opencode", "opencode", pinned="1.18.33", release="1.18.33"),
    # It is a script, so its release contains the Node.js that runs it.
    "qwen_code": lambda: AgentProgram("qwen_code", "qwen", pinned="0.24.4", release=f"0.24.4-node-{NODE_VERSION}"),
    # Its release has a revision, raised with every change of the pins in `mini_swe_agent.txt`.
    "mini_swe_agent": lambda: AgentProgram("mini_swe_agent", "mini", pinned="2.4.6", release="2.4.6-2"),
}
"""Name of a harness -> its pinned program, or the one that the environment names instead."""


def _program(name: str, command: str, pinned: str, tarball: str | None, node_tarball: str | None) -> AgentProgram:
    if not tarball:
        return AgentProgram(name, command, pinned, pinned)
    sources = [Path(source).expanduser() for source in (tarball, node_tarball) if source]
    for source in sources:
        if not source.is_file():
            raise ConfigError(f"{source} is not a file; the environment names it as a tarball of {name}")
    facts = [(str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return AgentProgram(name, command, pinned, f"tarball-{digest}", *sources)


async def ensure_program(box: Sandbox, program: AgentProgram) -> None:
    """Upload the program if the box lacks it; safe to repeat and concurrently. Raises ConfigError if it is missing."""
    found = await box.exec(f"test -x {shlex.quote(program.box_path)}", user="root", check=False)
    if found.exit_code == 0:
        return
    if not (program.host_directory / RECORD).is_file():
        fetch = program.name.replace("_", "-")
        raise ConfigError(
            f"{program.name} is neither in the box nor on this worker's machine; run "
            f"`ratchet admin agents fetch {fetch}`"
        )
    archive = await asyncio.to_thread(pack_program, program)
    # A name of its own, because the try before may still be uploading.
    incoming = f"/var/tmp/{program.directory_name}-{uuid.uuid4().hex[:8]}.tgz"
    await box.write_file(incoming, archive, user="root")
    # Unpacked beside its place and renamed, so that an interrupted try leaves no half program under its name.
    await box.exec(
        f"set -e; mkdir -p {BOX_AGENTS}; cd {BOX_AGENTS}; fresh=$(mktemp -d -p .); chmod 755 $fresh;"
        f" tar -xzf {incoming} -C $fresh; mv -T $fresh {program.directory_name} 2>/dev/null || rm -rf $fresh;"
        f" rm -f {incoming}; test -x {shlex.quote(program.box_path)}",
        user="root",
        timeout=_UNPACK_SECONDS,
    )


def pack_program(program: AgentProgram) -> Path:
    """Return the program's directory as one archive, which is made at the first upload and kept."""
    import tarfile

    target = program.host_directory.with_name(f"{program.directory_name}.tgz")
    if not target.is_file():
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
            archive.add(program.host_directory, arcname=".")
        Path(name).replace(target)
    return target
