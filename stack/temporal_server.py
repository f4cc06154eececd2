"""The local Temporal: which of two servers runs, and how each one is started.

| kind | what runs | where its state is |
|---|---|---|
| `server` | Temporal's own server and UI, built from `stack/temporal` | two databases beside the stack's own |
| `dev` | the dev server of Temporal's CLI, with its UI | the file `temporal.db` in the state directory |

The kind is RATCHET_TEMPORAL if that is set, else the one that the last `ratchet up` recorded in the state directory,
else `server`. `ratchet up` records what it starts, so a stack keeps its histories until a user sets RATCHET_TEMPORAL to
the other kind. None of it runs if TEMPORAL_ADDRESS names another server.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from ratchet import paths
from ratchet.errors import ConfigError, MachineError
from ratchet.progress import ReportProgress
from stack.temporal_build import ensure_server_program, find_go

SETTING = "RATCHET_TEMPORAL"
# The newest tag that `go install` accepts: later ones have replace directives.
CLI_MODULE = "github.com/temporalio/cli/cmd/temporal@v1.5.1"


class TemporalKind(StrEnum):
    SERVER = "server"
    DEV = "dev"


def temporal_kind(home: Path) -> TemporalKind:
    """Return the kind for the stack in `home`, by the rule above. Raises ConfigError for an unknown setting."""
    wanted = os.environ.get(SETTING)
    if wanted:
        if wanted not in list(TemporalKind):
            raise ConfigError(f"{SETTING}={wanted}: expected {' or '.join(TemporalKind)}")
        return TemporalKind(wanted)
    record = _record(home)
    if record.is_file():
        return TemporalKind(record.read_text().strip())
    return TemporalKind.SERVER


def _record(home: Path) -> Path:
    return home / "temporal.kind"


def settle_temporal_kind(home: Path, say: ReportProgress) -> TemporalKind:
    """Make sure that a program for the stack's Temporal is there, and record its kind.

    A stack without histories, on a machine that can neither build nor find the server, gets the dev server. Raises
    MachineError if the program for existing histories cannot be had.
    """
    kind = temporal_kind(home)
    if kind is TemporalKind.SERVER:
        try:
            ensure_server_program(say)
        except MachineError as error:
            if os.environ.get(SETTING) or _record(home).is_file():
                raise MachineError(
                    f"{error}; install Go, or set {SETTING}=dev to begin with an empty dev server"
                ) from None
            say(f"{error}: Temporal's dev server is used instead")
            kind = TemporalKind.DEV
    if kind is TemporalKind.DEV:
        ensure_temporal_cli(say)
    home.mkdir(parents=True, exist_ok=True)
    temporary = _record(home).with_suffix(".tmp")
    temporary.write_text(f"{kind}\n")
    temporary.rename(_record(home))
    return kind


def build_early() -> None:
    """Build the server if this stack will run it, beside the Python environment, which is not needed yet. `ratchet
    admin setup` waits for this build. If it fails, it builds again and says so."""
    if not os.environ.get("TEMPORAL_ADDRESS") and temporal_kind(paths.home()) is TemporalKind.SERVER and find_go():
        ensure_server_program(lambda line: print(f"temporal: {line}", file=sys.stderr, flush=True))


def run_temporal_server(ports: dict[str, int], database_url: str, namespace: str) -> NoReturn:
    """Replace this process with the server, which waits for Postgres and creates its databases and the namespace."""
    from ratchet.temporal_settings import load_temporal_settings
    from store.database import libpq_url

    program = ensure_server_program(print)
    arguments = [str(program), "serve", "-namespace", namespace]
    arguments += ["-retention-days", str(load_temporal_settings().retention_days)]
    names = ("temporal", "temporal_history", "temporal_matching", "temporal_worker")
    arguments += ["-ports", ",".join(str(ports[name]) for name in names)]
    os.execve(program, arguments, {**os.environ, "RATCHET_DATABASE_URL": libpq_url(database_url)})


def run_temporal_ui(port: int, server_address: str) -> NoReturn:
    """Replace this process with the UI of Temporal's own server."""
    program = ensure_server_program(print)
    os.execv(program, [str(program), "ui", "-port", str(port), "-server", server_address])


def installed_temporal_cli() -> Path | None:
    """Return Temporal's CLI on PATH, else the one in the cache, None without either."""
    on_path = shutil.which("temporal")
    built = paths.cache() / "bin" / "temporal"
    return Path(on_path) if on_path else built if built.is_file() else None


async def _downloaded(say: ReportProgress) -> Path | None:
    """Download the CLI through the SDK. None, with the reason as a progress line, if that fails."""
    from temporalio.testing import WorkflowEnvironment

    directory = paths.cache() / "bin"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        async with asyncio.timeout(120):
            async with await WorkflowEnvironment.start_local(download_dest_dir=str(directory)):
                pass
    except (RuntimeError, TimeoutError) as error:
        reason = " ".join(str(error).split()) or "no answer within 120 s"
        say(f"the download of temporal failed: {reason}")
        return None
    found = sorted(directory.glob("temporal-sdk-python-*"))
    if not found:
        return None
    found[-1].rename(directory / "temporal")
    return directory / "temporal"


def _built(say: ReportProgress) -> Path:
    go = find_go()
    if go is None:
        raise MachineError(
            "no `temporal` program: it is not on PATH, it cannot be downloaded, and Go is not installed to build it; "
            "install temporal or Go"
        )
    say("building temporal with go instead; this takes some minutes, once")
    directory = paths.cache() / "bin"
    environment = {**os.environ, "GOBIN": str(directory), "GOFLAGS": "-mod=mod"}
    result = subprocess.run(
        [go, "install", CLI_MODULE], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    if result.returncode != 0:
        raise MachineError(f"building temporal failed: {result.stderr.strip()[-300:]}")
    return directory / "temporal"


def ensure_temporal_cli(say: ReportProgress) -> Path:
    """Find the CLI: PATH, the cache, the SDK's download, `go install`. Raises MachineError if all of them fail."""
    found = installed_temporal_cli()
    if found is not None:
        return found
    say("downloading temporal")
    return asyncio.run(_downloaded(say)) or _built(say)


def run_dev_server(home: Path, port: int, ui_port: int, namespace: str) -> NoReturn:
    """Replace this process with the dev server. Its history and visibility are kept in `temporal.db`."""
    program = ensure_temporal_cli(print)
    arguments = [str(program), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(port)]
    arguments += ["--ui-ip", "127.0.0.1", "--ui-port", str(ui_port), "--namespace", namespace]
    arguments += ["--db-filename", str(home / "temporal.db"), "--log-level", "error"]
    arguments += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
    os.execv(program, arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the end of `make setup` ends the compiler, too
    try:
        build_early()
    except (MachineError, ConfigError) as error:
        sys.exit(f"temporal: {error}")
