"""Write the debug dumps that commands have asked for, a file per step, while their runs go on.

A file `rollout_dumps/RUN` of the state directory holds the path pattern of a run's dumps, until all of them are
written. The learner service runs `python -P -m training.rollout_dumps` as long as there is such a file, so dumps depend
neither on the command that asked for them nor on its connection.
"""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import structlog
from sqlalchemy import select

from ratchet import paths
from ratchet.errors import ConfigError
from ratchet.logs import configure_logs
from ratchet.progress import ReportProgress
from ratchet.types import RunState
from store.database import Database
from store.schema import RunTable

_LOG = structlog.get_logger()
_LOOK_SECONDS, _LOOK_SHARE = 3.0, 20.0
"""A look is followed by a pause of so many seconds, and at least so many times its own duration."""
_LAST_LOOK_SECONDS, _WAIT_SECONDS = 600.0, 0.2


def dump_requests(home: Path | None = None) -> list[Path]:
    """Return the files that ask for dumps; their names are those of the runs."""
    return sorted(one for one in ((home or paths.home()) / "rollout_dumps").glob("*") if one.suffix != ".tmp")


def request_dumps(home: Path, run_id: str, pattern: str) -> None:
    """Ask for the dumps of a run, also of its steps so far. Raises ConfigError if they cannot be written."""
    path = Path(pattern).expanduser().absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: dumps cannot be written there ({error.strerror}); name another path") from None
    request = home / "rollout_dumps" / run_id
    request.parent.mkdir(exist_ok=True)
    request.with_name(f"{run_id}.tmp").write_text(str(path))
    request.with_name(f"{run_id}.tmp").rename(request)


async def wait_for_dumps(home: Path, run_id: str, say: ReportProgress) -> None:
    """Wait until all dumps of a run that has ended are written, for at most ten minutes."""
    request = home / "rollout_dumps" / run_id
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_LOOK_SECONDS):
            while request.exists():
                await asyncio.sleep(_WAIT_SECONDS)
            return
    say(f"not all rollouts of run {run_id} are dumped; see `ratchet admin logs learner`")


async def write_requested(database: Database) -> None:
    """Write what is asked for until nothing is. An error, such as an outage or a full disk, only delays the files."""
    while requests := dump_requests():
        started = time.monotonic()
        for request in requests:
            try:
                await _write(database, request)
            except Exception as error:  # of any kind: other runs' dumps do not depend on this one's
                _LOG.warning("rollouts are not dumped", run=request.name, reason=str(error)[:300])
        await asyncio.sleep(max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - started)))


async def _write(database: Database, request: Path) -> None:
    from training.sample_export import dump_steps

    pattern = request.read_text()
    async with database.begin() as connection:
        state = await connection.scalar(select(RunTable.state).where(RunTable.run_id == request.name))
        if state is not None:
            written = await dump_steps(connection, request.name, pattern, again=False)
            for path, number in written.items():
                _LOG.info("rollouts dumped", run=request.name, path=str(path), samples=number)
    if state not in (RunState.RUNNING, RunState.PAUSED) and request.read_text() == pattern:
        request.unlink()


async def _main() -> None:
    async with Database(os.environ["RATCHET_DATABASE_URL"], pool_size=1) as database:
        await write_requested(database)


if __name__ == "__main__":
    from training.service import die_with_service

    die_with_service(int(sys.argv[1]))
    configure_logs("learner")
    asyncio.run(_main())
