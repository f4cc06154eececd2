"""Temporal's dev server with its UI: find, download or build the program, and run it on a database file.

It runs unless TEMPORAL_ADDRESS names another server.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ratchet import paths
from ratchet.errors import MachineError

# The newest tag that `go install` accepts: later ones have replace directives.
GO_MODULE = "github.com/temporalio/cli/cmd/temporal@v1.5.1"


def installed_temporal() -> Path | None:
    """Return the program on PATH, else the one in the cache, None without either."""
    on_path = shutil.which("temporal")
    built = paths.cache() / "bin" / "temporal"
    return Path(on_path) if on_path else built if built.is_file() else None


async def _downloaded(say: Callable[[str], None]) -> Path | None:
    """Download the program through the SDK. None, with the reason as a progress line, if that fails."""
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
    found = sorted(directory.glob("temporal-sdk-python-*")) or sorted(directory.glob("temporal*"))
    if not found:
        return None
    found[-1].rename(directory / "temporal")
    return directory / "temporal"


def _built(say: Callable[[str], None]) -> Path:
    go = shutil.which("go") or next(
        (path for path in ("/usr/local/go/bin/go", "/usr/lib/go/bin/go") if Path(path).is_file()), None
    )
    if go is None:
        raise MachineError(
            "no `temporal` program: it is not on PATH, it cannot be downloaded, and Go is not installed to build it; "
            "install temporal or Go"
        )
    say("building temporal with go instead; this takes some minutes, once")
    directory = paths.cache() / "bin"
    environment = {**os.environ, "GOBIN": str(directory), "GOFLAGS": "-mod=mod"}
    result = subprocess.run(
        [go, "install", GO_MODULE], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    if result.returncode != 0:
        raise MachineError(f"building temporal failed: {result.stderr.strip()[-300:]}")
    return directory / "temporal"


def ensure_temporal(say: Callable[[str], None] = print) -> Path:
    """Find the program: PATH, the cache, the SDK's download, `go install`. Raises MachineError if all of them fail."""
    found = installed_temporal()
    if found is not None:
        return found
    say("downloading temporal")
    return asyncio.run(_downloaded(say)) or _built(say)


def run_temporal(home: Path, port: int, ui_port: int) -> NoReturn:
    """Replace this process with the server. Its history and visibility are kept in `temporal.db`."""
    program = ensure_temporal()
    arguments = [
        str(program),
        "server",
        "start-dev",
        "--ip",
        "127.0.0.1",
        "--port",
        str(port),
        "--ui-port",
        str(ui_port),
    ]
    arguments += ["--ui-ip", "127.0.0.1", "--db-filename", str(home / "temporal.db"), "--log-level", "error"]
    arguments += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
    os.execv(program, arguments)
