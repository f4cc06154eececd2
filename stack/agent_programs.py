"""Fetch agent programs and lay each out as a read-only directory that boxes mount at /opt/agents.

Boxes have no network, so the programs that run in them are pinned and fetched once per machine, from npm or PyPI.
"""

import contextlib
import json
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from activities.harnesses import agent_programs
from activities.harnesses.agent_programs import RECORD, AgentProgram
from ratchet.durations import duration_in_words
from ratchet.errors import ConfigError, MachineError
from ratchet.make_once import making
from ratchet.progress import ReportProgress
from sandbox_gateway.python_layer import PYTHON_LAYER_PATH

FETCHABLE = {name.replace("_", "-"): make for name, make in agent_programs.PROGRAMS.items()}
_TARBALLS = {"claude_code": "VIME_AGENT_CC_TARBALL", "codex": "RATCHET_CODEX_TARBALL"}
"""Harness → the variable that names its tarball."""
_NPM_PACKAGES = {
    "claude_code": "@anthropic-ai/claude-code-linux-{cpu}@{version}",
    "codex": "@openai/codex@{version}-linux-{cpu}",
    "opencode": "opencode-linux-{cpu}@{version}",
    "qwen_code": "@qwen-code/qwen-code@{version}",
}
_NODE_PACKAGE = "node-linux-{cpu}@{version}"
_CPUS = {"x86_64": "x64", "aarch64": "arm64"}
_NATIVE = {
    "claude_code": ("package/claude", "package/bin/claude"),
    "codex": ("package/vendor/*/bin/codex",),
    "opencode": ("package/bin/opencode",),
}
_SCRIPTS = {
    "claude_code": ("package/cli.js",),
    "codex": ("package/bin/codex.js",),
    "qwen_code": ("package/cli-entry.js",),
}
_REPORT_SECONDS = 15.0
_LEFT_OUT = "voice"  # speech input: half of Codex's files, unused in a box
_SCRIPT_WRAPPER = """\
#!/bin/sh
here=$(dirname "$(dirname "$(readlink -f "$0")")")
exec "$here/node/bin/node" "$here/{script}" "$@"
"""
_PYTHON_WRAPPER = """\
#!/bin/sh
program='import sys; sys.path.insert(0, "{packages}"); from minisweagent.run.mini import app; sys.exit(app())'
exec {python}/bin/python3 -I -c "$program" "$@"
"""


def fetch_program(program: AgentProgram, say: ReportProgress) -> Path:
    """Return the program's directory, fetched once if missing. Raises MachineError and ConfigError."""
    target = program.host_directory
    if (target / RECORD).is_file():
        return target
    with making(target, say) as scratch:
        if (target / RECORD).is_file():
            return target
        fresh = scratch / "layer"
        fresh.mkdir(mode=0o755)
        lay_out = _lay_out_python if program.name == "mini_swe_agent" else _lay_out_npm
        source, version = lay_out(program, fresh, scratch, say)
        (fresh / RECORD).write_text(json.dumps({"version": version, "source": source}))
        fresh.rename(target)
    return target


def missing_program(harness: str) -> str:
    """Say that the program of a harness is not on this machine, and how to get it; empty if nothing is missing."""
    program = _program_of(harness)
    if program is None or program.tarball is not None or (program.host_directory / RECORD).is_file():
        return ""
    variable = _TARBALLS.get(harness)
    return (
        f"{harness} is not on this machine, and boxes have it only if their image contains {program.box_path}: run "
        f"`ratchet admin agents fetch {harness.replace('_', '-')}`"
        + (f", or name a tarball in {variable}" if variable else "")
    )


def provide_program(harness: str, has_gateway: bool, say: ReportProgress) -> None:
    """Lay out the tarball that the environment names for this harness, before a run starts.

    `has_gateway`: whether boxes get their programs from this machine alone; then a missing one raises ConfigError.
    Raises MachineError and ConfigError for a tarball that cannot be used.
    """
    program = _program_of(harness)
    if program is not None and program.tarball is not None:
        fetch_program(program, say)
    elif has_gateway and (missing := missing_program(harness)):
        raise ConfigError(f"harness.name: {missing}")


def lay_out_tarballs(say: ReportProgress) -> None:
    """Lay out every tarball that the environment names, for a worker; say why one cannot be used."""
    for make in FETCHABLE.values():
        try:
            if (program := make()).tarball is not None:
                fetch_program(program, say)
        except (ConfigError, MachineError, OSError) as error:
            say(str(error))


def _program_of(harness: str) -> AgentProgram | None:
    make = agent_programs.PROGRAMS.get(harness)
    return None if make is None else make()


def installed_programs() -> list[dict[str, str]]:
    """List what is installed on this machine: name, version, source, directory."""
    found = []
    for record in sorted(agent_programs.agents_directory().glob(f"*/{RECORD}")):
        facts = json.loads(record.read_text())
        found.append({"agent": record.parent.name.split("-")[0], **facts, "directory": str(record.parent)})
    return found


def _lay_out_npm(program: AgentProgram, layer: Path, temporary: Path, say: ReportProgress) -> tuple[str, str]:
    if program.tarball is not None:
        tarball, source = program.tarball, str(program.tarball)
    else:
        source = _NPM_PACKAGES[program.name].format(cpu=_cpu(program), version=program.pinned)
        tarball = _npm_pack(source, temporary, say)
    with _saying(f"unpacking {tarball.name}", say):
        _unpack(tarball, layer)
    binary = layer / "bin" / program.command
    binary.parent.mkdir()
    native = _first(layer, _NATIVE.get(program.name, ()))
    if native is not None:
        native.chmod(0o755)
        binary.symlink_to(Path("..") / native.relative_to(layer))
    else:
        _wrap_script(program, layer, binary, _node_tarball(program, temporary, say))
    package = json.loads((layer / "package" / "package.json").read_text())
    return source, str(package["version"]).partition("-")[0]


def _cpu(program: AgentProgram) -> str:
    """Return npm's name of this machine's processor."""
    cpu = _CPUS.get(platform.machine())
    if cpu is None:
        raise MachineError(f"{program.name} has no package for {platform.machine()}; give a tarball that runs here")
    return cpu


def _node_tarball(program: AgentProgram, temporary: Path, say: ReportProgress) -> Path:
    if program.node_tarball is not None:
        return program.node_tarball
    package = _NODE_PACKAGE.format(cpu=_cpu(program), version=agent_programs.NODE_VERSION)
    directory = temporary / "node"
    directory.mkdir()
    return _npm_pack(package, directory, say)


def _npm_pack(package: str, directory: Path, say: ReportProgress) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise MachineError(
            "npm is not on PATH; install Node.js, or name a tarball: VIME_AGENT_CC_TARBALL, RATCHET_CODEX_TARBALL"
        )
    command = [npm, "pack", "--silent", "--pack-destination", str(directory), package]
    with _saying(f"fetching {package} with npm", say):
        _run(command, f"npm cannot fetch {package}")
    (tarball,) = directory.glob("*.tgz")
    return tarball


def _unpack(tarball: Path, directory: Path) -> None:
    """Unpack with the system's tar, which supports every compression that Node's and npm's archives use."""
    options = ["--no-same-owner", f"--exclude=*/{_LEFT_OUT}/*", "-C", str(directory)]
    _run(["tar", "-xf", str(tarball), *options], f"{tarball} cannot be unpacked")
    if not (directory / "package").is_dir():
        tops = [entry for entry in directory.iterdir() if entry.is_dir()]
        if len(tops) != 1:
            raise ConfigError(f"{tarball} is no npm tarball: no `package` directory in it")
        tops[0].rename(directory / "package")


def _wrap_script(program: AgentProgram, layer: Path, binary: Path, node_tarball: Path) -> None:
    """Write a launcher for a JavaScript package beside Node; it finds both from its place, on its host, too."""
    script = _first(layer, _SCRIPTS.get(program.name, ()))
    if script is None:
        wanted = " nor ".join(str(paths) for paths in (_NATIVE.get(program.name), _SCRIPTS.get(program.name)) if paths)
        raise ConfigError(f"{program.tarball or program.name} holds neither {wanted}")
    node = layer / "node"
    node.mkdir()
    _run(
        ["tar", "-xf", str(node_tarball), "--no-same-owner", "--strip-components=1", "-C", str(node)],
        "Node cannot be unpacked",
    )
    binary.write_text(_SCRIPT_WRAPPER.format(script=script.relative_to(layer)))
    binary.chmod(0o755)


def _lay_out_python(program: AgentProgram, layer: Path, _temporary: Path, say: ReportProgress) -> tuple[str, str]:
    """Install the program for the interpreter of the boxes' Python layer."""
    from sandbox_gateway.python_layer import install_packages

    source = f"mini-swe-agent=={program.pinned}"
    pins = resources.files("stack").joinpath("mini_swe_agent.txt").read_text().splitlines()
    packages = [pin for pin in pins if pin and not pin.startswith("#")]
    with _saying(f"installing {source}", say):
        install_packages(layer / "packages", ["--no-deps", *packages])
    (layer / "bin").mkdir()
    wrapper = layer / "bin" / program.command
    in_box = f"{agent_programs.BOX_AGENTS}/{program.directory_name}/packages"
    wrapper.write_text(_PYTHON_WRAPPER.format(python=PYTHON_LAYER_PATH, packages=in_box))
    wrapper.chmod(0o755)
    return source, program.pinned


def _first(directory: Path, patterns: tuple[str, ...]) -> Path | None:
    return next((found for pattern in patterns for found in sorted(directory.glob(pattern)) if found.is_file()), None)


def _run(command: list[str], problem: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise MachineError(f"{problem}: {(done.stderr or done.stdout).strip()[-400:]}")


@contextlib.contextmanager
def _saying(what: str, say: ReportProgress) -> Iterator[None]:
    """Say what is done now, and every _REPORT_SECONDS that it goes on: neither npm nor pip tells how far it is."""
    say(what)
    over = threading.Event()

    def report() -> None:
        started = time.monotonic()
        while not over.wait(_REPORT_SECONDS):
            say(f"still {what}: {duration_in_words(time.monotonic() - started)}")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
