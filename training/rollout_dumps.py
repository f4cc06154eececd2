"""Write the debug dumps that commands have asked for, a file per step, while their runs go on.

A file `rollout_dumps/RUN` of the state directory holds the path pattern of a run's dumps until all are written. The
learner service runs this module as long as there is one, so dumps do not depend on the command that asked for them.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from sqlalchemy import select

from ratchet import paths
from ratchet.background_task import errors_logged
from ratchet.errors import ConfigError
from ratchet.logs import configure_logs
from ratchet.progress import ReportProgress
from ratchet.types import OPEN_STATES
from store.database import Database
from store.schema import RunTable
from training.sample_export import dump_steps
from training.service import die_with_service

_LOOK_SECONDS, _LAST_LOOK_SECONDS = 3.0, 600.0


def dump_path(pattern: str) -> Path:
    """Return the whole path, after making its directory. Raises ConfigError if that cannot be done."""
    path = Path(pattern).expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
    except OSError as error:
        raise ConfigError(f"{path}: dumps cannot be written there ({error.strerror}); name another path") from None


def request_dumps(run_id: str, path: Path | None) -> None:
    """Ask for the dumps of a run, also of its steps so far."""
    if path is not None:
        paths.dump_requests().mkdir(exist_ok=True)
        (paths.dump_requests() / run_id).write_text(str(path))


async def wait_for_dumps(run_id: str, say: ReportProgress) -> None:
    """Wait until all dumps of a run that has ended are written, for at most ten minutes."""
    until = time.monotonic() + _LAST_LOOK_SECONDS
    while (paths.dump_requests() / run_id).exists():
        await asyncio.sleep(0.2)
        if time.monotonic() > until:
            say(f"not all rollouts of run {run_id} are dumped; see `ratchet admin logs learner`")
            return


async def write_requested(url: str) -> None:
    """Write what is asked for until nothing is. An error, such as an outage or a full disk, only delays the files."""
    async with Database(url, pool_size=1) as database:
        while requests := sorted(paths.dump_requests().glob("*")):
            started = time.monotonic()
            for request in requests:
                with errors_logged("rollouts are not dumped", run=request.name):
                    await _write(database, request)
            await asyncio.sleep(max(_LOOK_SECONDS, time.monotonic() - started))


async def _write(database: Database, request: Path) -> None:
    """Write the dumps of one run, and forget the request once the run has ended."""
    async with database.begin() as connection:
        state = await connection.scalar(select(RunTable.state).where(RunTable.run_id == request.name))
        if state is None or not (pattern := request.read_text()):  # no row yet, or a command writes the request
            return
        await dump_steps(connection, request.name, pattern, again=False)
    if state not in OPEN_STATES and request.read_text() == pattern:
        request.unlink()


if __name__ == "__main__":
    die_with_service(int(sys.argv[1]))
    configure_logs("learner")
    asyncio.run(write_requested(os.environ["RATCHET_DATABASE_URL"]))
