"""The host's side of `launcher.sh`: pack the files for the box, run its subcommands, parse their output."""

import io
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.errors import CommandFailedError
from sandboxes.base import Sandbox

RUN_DIR = "/run/ratchet"
STARTED_ALREADY = 17
START_TIMEOUT_SECONDS = 60.0
END_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StartResult:
    """`started` False: an earlier try started this attempt, whose agent runs or has ended."""

    started: bool


class ExitRecord(BaseModel):
    """`exit.json` as the launcher writes it; times in seconds of the box's monotonic clock.

    `reason`: `exit`: the program ended by itself. `reached`: it has not ended; it is suspended at its deadline until
    `resume` or `stop`. `deadline`: its time was up. `stalled`: `stop` ended it, because it made no model call for too
    long. `guard`: `stop` ended it, because the rollout's guard was spent. `ended`: `end` came first. `crashed`: the
    launcher died. `used_seconds`: from `started` to `ended`, without the time for which it was suspended last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    exit_code: int | None
    reason: Literal["exit", "reached", "deadline", "stalled", "guard", "ended", "crashed"]
    started: float
    ended: float
    used_seconds: float


class AgentEnd(NamedTuple):
    """The launcher's record, and the last lines of the program's standard error."""

    record: ExitRecord
    errors: str


def output_path(attempt: int) -> str:
    """Return the path of the program's standard output, which root opens, so that the agent cannot redirect it."""
    return f"{RUN_DIR}/{attempt}/output"


def pack_bundle(agent_files: Mapping[str, bytes], token: str) -> bytes:
    """Return a tar of the launcher, the token (0600) and the agent's files, of which `command.sh` is run."""
    assert "command.sh" in agent_files, "a bundle needs its command.sh"
    launcher = resources.files("activities.harnesses").joinpath("launcher.sh").read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        add_file(tar, "launcher.sh", launcher, 0o700)
        add_file(tar, "token", token.encode() + b"\n", 0o600)
        for name, data in agent_files.items():
            assert PurePosixPath(name).name == name, f"agent files lie in one folder, got {name!r}"
            add_file(tar, f"agent/{name}", data, 0o644)
    return buffer.getvalue()


def add_file(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = mode
    tar.addfile(info, io.BytesIO(data))


def launcher_command(attempt: int, subcommand: str, *arguments: str) -> str:
    """Return the command line of a subcommand for an attempt that was started."""
    return shlex.join(["sh", f"{RUN_DIR}/{attempt}/launcher.sh", subcommand, str(attempt), *arguments])


async def start_once(
    box: Sandbox, agent_files: Mapping[str, bytes], token: str, *, attempt: int, user: str, budget_seconds: float
) -> StartResult:
    """Start the agent by one upload and one command. Every try sends its own bundle; the first one wins."""
    incoming = f"{RUN_DIR}/incoming-{secrets.token_hex(8)}"
    await box.write_file(f"{incoming}.tar", pack_bundle(agent_files, token), user="root")
    launch = shlex.join(
        ["sh", f"{incoming}/launcher.sh", "start", str(attempt), user, f"{budget_seconds:.2f}", incoming]
    )
    command = (
        f"umask 077 && chmod 700 {RUN_DIR} && mkdir {incoming}"
        f" && tar -xf {incoming}.tar -C {incoming} && rm {incoming}.tar && {launch}"
    )
    result = await box.exec(command, user="root", check=False, timeout=START_TIMEOUT_SECONDS)
    if result.exit_code not in (0, STARTED_ALREADY):
        raise CommandFailedError(command, result.exit_code, result.stdout, result.stderr)
    return StartResult(started=result.exit_code == 0)


async def read_output(box: Sandbox, attempt: int, max_bytes: int) -> bytes:
    """Return at most `max_bytes` of the output, half from the start and half from the end. Empty if not started."""
    path = output_path(attempt)
    try:
        data = await box.read_file(path, user="root", max_bytes=max_bytes + 1)
    except FileNotFoundError:
        return b""
    if len(data) <= max_bytes:
        return data
    half = max_bytes // 2
    end = await box.exec(f"tail -c {half} {path}", user="root", timeout=END_TIMEOUT_SECONDS)
    return data[:half] + b"\n[the middle is left out]\n" + end.stdout.encode()


async def wait_for_exit(box: Sandbox, attempt: int) -> AgentEnd:
    """Wait for the end of the agent, or until it is suspended at its deadline."""
    command = launcher_command(attempt, "wait")
    result = await box.exec(command, user="root", check=False, timeout=None)
    if result.exit_code != 0:
        raise CommandFailedError(command, result.exit_code, result.stdout, result.stderr)
    return parse_exit(result.stdout)


def parse_exit(printed: str) -> AgentEnd:
    """Parse the output of `launcher.sh wait`. Raises CommandFailedError if it is not an exit record."""
    first, _, rest = printed.partition("\n")
    try:
        return AgentEnd(ExitRecord.model_validate_json(first), rest.strip())
    except ValidationError as error:
        raise CommandFailedError("launcher.sh wait", 0, printed, f"not an exit record: {error}") from error


async def extend_deadline(box: Sandbox, attempt: int, waited_seconds: float) -> None:
    """Move the deadline to start + budget + `waited_seconds`, the sum of all waits so far (not an increment)."""
    await box.exec(launcher_command(attempt, "deadline", f"{waited_seconds:.2f}"), user="root")


async def is_suspended(box: Sandbox, attempt: int) -> bool:
    """Return whether the agent is suspended at its deadline."""
    result = await box.exec(f"test -e {RUN_DIR}/{attempt}/reached", user="root", check=False)
    return result.exit_code == 0


async def resume_suspended(box: Sandbox, attempt: int, seconds: float) -> None:
    """Let an agent that is suspended at its deadline go on for `seconds`; nothing happens if it is not suspended."""
    await box.exec(launcher_command(attempt, "resume", f"{seconds:.2f}"), user="root")


async def stop(box: Sandbox, attempt: int, reason: Literal["deadline", "stalled", "guard"]) -> None:
    """End the whole tree, recorded as `reason`: `BaseHarness.wait` then returns `time_budget`. `deadline`: only if the
    agent is suspended at its deadline. `stalled`: it makes no progress. `guard`: the rollout's."""
    await box.exec(launcher_command(attempt, "stop", reason), user="root", timeout=END_TIMEOUT_SECONDS)


async def end_tree(box: Sandbox, attempt: int) -> None:
    """End every process of the agent's user, if the attempt was started. Raises CommandFailedError if one is left."""
    folder = f"{RUN_DIR}/{attempt}"
    end = launcher_command(attempt, "end")
    command = f"if [ -d {folder} ]; then : > {folder}/end_wanted; fi; if [ -f {folder}/launcher.sh ]; then {end}; fi"
    await box.exec(command, user="root", timeout=END_TIMEOUT_SECONDS)
