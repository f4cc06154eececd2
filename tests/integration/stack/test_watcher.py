"""Real parts under the real supervisord: hung, suspended, crashing and slow ones, and what the watcher does."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
import yaml

from client.steering import steer_run
from ratchet.errors import MachineError
from ratchet.types import SteeringAction
from stack import probes, readiness
from stack.part_health import HealthLimits, HealthState, PartHealth, health_written_at, read_health
from stack.parts import BOX_HOSTS_FILE, Part, Stack
from stack.ports import is_free
from stack.readiness import log_sizes, wait_until_answering
from stack.supervisor import Supervisor
from stack.watcher import Watcher
from store import open_runs, runs
from store.database import Database
from tests.free_ports import free_ports
from tests.integration.training.records import make_config, make_run

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 120.0
QUICK = HealthLimits(probe_seconds=2, interval_seconds=0.2, failing_seconds=4, start_seconds=60)


class FewParts(Stack):
    """A stack of the given parts."""

    def __init__(self, home: Path, *parts: Part) -> None:
        self.few = list(parts)
        super().__init__(home)

    def parts(self) -> list[Part]:
        return self.few


def page_server(home: Path, answer: str) -> Part:
    """The part temporal-ui as a process that listens on the UI's port and does `answer` with each connection."""
    port = Stack(home).ports["temporal_ui"]
    program = f"""
import socket, time
listener = socket.create_server(("127.0.0.1", {port}))
calls = 0
while True:
    connection, _ = listener.accept()
    calls += 1
    connection.recv(4096)
    {answer}
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
    connection.close()
"""
    (home / "page_server.py").write_text(program)
    return Part("temporal-ui", [sys.executable, "-P", str(home / "page_server.py")], 50, stop_wait_seconds=2)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that the embedded Postgres' user can read."""
    with tempfile.TemporaryDirectory(prefix="ratchet-watch-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        free_ports(Path(directory))
        yield Path(directory)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of seconds, and no Temporal to wait for."""
    for name in ("postgres", "temporal-ui", "engine", "adapter"):
        monkeypatch.setitem(probes.LIMITS, name, QUICK)
    monkeypatch.setitem(probes.NEEDS, "temporal-ui", ())
    monkeypatch.delenv("RATCHET_HOME", raising=False)


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Watcher]:
    """The stack's parts under supervisord, with a watcher in this process."""
    supervisor = Supervisor(stack)
    await asyncio.to_thread(supervisor.up)
    stop, watcher = asyncio.Event(), Watcher(stack)
    task = asyncio.create_task(watcher.run(stop))
    try:
        yield watcher
    finally:
        stop.set()
        await task
        await asyncio.to_thread(supervisor.down)


async def wait_for(stack: Stack, part: str, condition: Callable[[PartHealth], bool], what: str) -> PartHealth:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = read_health(stack.home).get(part)
        if found is not None and condition(found):
            return found
        assert time.monotonic() < deadline, f"{part} {what}: {found}"
        await asyncio.sleep(0.1)


def answers(part: PartHealth) -> bool:
    return part.state is HealthState.ANSWERING


def postgres_part() -> Part:
    command = [sys.executable, "-P", "-m", "cli.main", "part", "postgres"]
    return Part("postgres", command, 10, stop_signal="INT", stop_wait_seconds=30)


async def test_a_suspended_postgres_is_restarted_and_keeps_what_it_holds(home: Path) -> None:
    stack = FewParts(home, postgres_part())
    async with watched(stack):
        from stack.postgres import ensure_database

        await ensure_database(stack.ports["postgres"])
        before = await wait_for(stack, "postgres", answers, "answers")
        url = stack.environment()["RATCHET_DATABASE_URL"]
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE kept (n int); INSERT INTO kept VALUES (7)")
        await connection.close()
        assert before.pid is not None and before.detail.startswith("postgres ")
        os.kill(before.pid, signal.SIGSTOP)
        failing = await wait_for(stack, "postgres", lambda part: part.state is HealthState.FAILING, "is found")
        assert "SIGSTOP" in failing.reason
        after = await wait_for(stack, "postgres", lambda part: part.restarts == 1 and answers(part), "is back")
        assert after.pid != before.pid and "SIGSTOP" in after.last_error
        connection = await asyncpg.connect(url)
        assert await connection.fetchval("SELECT n FROM kept") == 7
        await connection.close()


async def test_a_postgres_that_accepts_no_writes_or_no_connections_is_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = yaml.safe_load((ROOT / "temporal.yaml").read_text())
    settings["postgres"]["max_connections"] = 20
    (home / "temporal.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("RATCHET_TEMPORAL_CONFIG", str(home / "temporal.yaml"))
    stack = FewParts(home, postgres_part())
    async with watched(stack):
        from stack.postgres import ensure_database

        await ensure_database(stack.ports["postgres"])
        await wait_for(stack, "postgres", answers, "answers")
        connection = await asyncpg.connect(stack.environment()["RATCHET_DATABASE_URL"])
        await connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await connection.execute("SELECT pg_reload_conf()")
        found = await wait_for(stack, "postgres", lambda part: part.state is HealthState.WAITING, "is found")
        assert "accepts no writes" in found.reason
        await connection.execute("SET transaction_read_only = off")
        await connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await connection.execute("SELECT pg_reload_conf()")
        await wait_for(stack, "postgres", answers, "answers again")
        taken = []
        with pytest.raises(asyncpg.TooManyConnectionsError):
            while True:
                taken.append(await asyncpg.connect(stack.environment()["RATCHET_DATABASE_URL"]))
        found = await wait_for(stack, "postgres", lambda part: part.state is HealthState.WAITING, "is found")
        assert "too many clients" in found.reason and found.restarts == 0
        for one in (*taken, connection):
            await one.close()


async def test_a_part_that_accepts_connections_and_answers_nothing_is_restarted(home: Path) -> None:
    """Its process lives and its port is open, as with a server whose every request hangs after the tenth."""
    stack = FewParts(home, page_server(home, "if calls > 10: time.sleep(1000)"))
    async with watched(stack):
        first = await wait_for(stack, "temporal-ui", answers, "answers")
        found = await wait_for(stack, "temporal-ui", lambda part: part.restarts > 0 and answers(part), "is back")
        assert found.pid != first.pid and "no answer within" in found.last_error


async def test_a_slow_part_is_not_called_dead(home: Path) -> None:
    """Each answer takes most of the probe's limit, and one of five takes longer; no limit is reached in a row."""
    stack = FewParts(home, page_server(home, "time.sleep(2.5 if calls % 10 == 9 else 0.7)"))
    async with watched(stack):
        first = await wait_for(stack, "temporal-ui", answers, "answers")
        await wait_for(stack, "temporal-ui", lambda part: part.state is HealthState.SLOW, "is slow once")
        found = await wait_for(stack, "temporal-ui", answers, "answers again")
        assert (found.pid, found.restarts) == (first.pid, 0)


async def test_a_part_that_computes_is_slow_until_its_limit_and_then_restarted(home: Path) -> None:
    """It answers nothing and uses CPU all the time: it is not told from one that is late until its time is over."""
    stack = FewParts(home, page_server(home, "while calls > 10: pass"))
    async with watched(stack):
        await wait_for(stack, "temporal-ui", answers, "answers")
        seen = set()

        def is_back(part: PartHealth) -> bool:
            seen.add(part.state)
            return part.restarts > 0 and answers(part)

        await wait_for(stack, "temporal-ui", is_back, "is back")
        assert HealthState.SLOW in seen and HealthState.FAILING not in seen


async def test_a_part_that_refuses_is_failing_at_once(home: Path) -> None:
    stack = FewParts(home, page_server(home, "if calls > 10: listener.close(); time.sleep(1000)"))
    async with watched(stack):
        await wait_for(stack, "temporal-ui", answers, "answers")
        await wait_for(stack, "temporal-ui", lambda part: part.state is HealthState.FAILING, "is found")


async def test_a_part_that_dies_at_every_start_is_given_up_with_its_error_until_a_person_acts(home: Path) -> None:
    flag = home / "mended"
    script = f"test -e {flag} && exec sleep 1000; echo 'ValueError: head size 96 is not supported'; echo bye; exit 1"
    stack = FewParts(home, Part("egress", ["sh", "-c", script], 40))
    async with watched(stack):
        found = await wait_for(stack, "egress", lambda part: part.state is HealthState.GIVEN_UP, "is given up")
        assert found.last_error == "ValueError: head size 96 is not supported" and found.restarts >= 5
        assert "head size 96" in found.summary(time.time())
        supervisor = Supervisor(stack)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (await asyncio.to_thread(supervisor.states))[0].state != "stopped":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        flag.write_text("")
        await asyncio.to_thread(supervisor.up)
        found = await wait_for(stack, "egress", answers, "answers")
        assert (found.restarts, found.last_error) == (0, "")


async def test_runs_are_paused_once_if_a_part_that_they_need_is_given_up(
    home: Path, database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Postgres is away when it happens, or the part's log has a NUL. A person who resumes the run too early is
    told why it cannot go on."""
    await make_run(database, run_id, make_config())
    stack = FewParts(home, Part("learner", ["sh", "-c", r"printf 'OSError: no GPU \000\n'; exit 1"], 40))
    monkeypatch.setenv("RATCHET_DATABASE_URL", "postgresql://ratchet@127.0.0.1:9/ratchet")
    async with watched(stack):
        await wait_for(stack, "learner", lambda part: part.state is HealthState.GIVEN_UP, "is given up")
        await asyncio.sleep(2)
        assert not read_health(home)["learner"].runs_paused
        monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
        await wait_for(stack, "learner", lambda part: part.runs_paused, "pauses the runs")
        async with database.begin() as connection:
            row = await runs.get_run(connection, run_id)
            assert row is not None and row.state == "paused"
            assert row.state_reason.startswith("learner is given up: it ended") and "OSError" in row.state_reason
            await open_runs.resume_run(connection, run_id)
        await asyncio.sleep(2)
        async with database.begin() as connection:
            again = await runs.get_run(connection, run_id)
        assert again is not None and again.state == "running", "what a person has resumed is not paused again"
        with pytest.raises(MachineError, match=r"learner is given up .* run `ratchet up` first"):
            await steer_run(stack, SteeringAction.RESUME, run_id, by="a test")


async def test_a_part_waits_for_the_part_that_it_needs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Postgres a part that needs it fails, and is not restarted for that."""
    monkeypatch.setitem(probes.NEEDS, "temporal-ui", ("postgres",))
    gone = Part("postgres", ["sleep", "1000"], 10)
    stack = FewParts(home, gone, page_server(home, "time.sleep(1000)"))
    async with watched(stack):
        found = await wait_for(stack, "temporal-ui", lambda part: part.reason == "waits for postgres", "waits")
        pid = found.pid
        await asyncio.sleep(3 * QUICK.failing_seconds)  # thrice its limit
        found = read_health(home)["temporal-ui"]
        assert (found.pid, found.restarts) == (pid, 0)


async def test_up_says_why_a_part_does_not_come_up(home: Path) -> None:
    """An error of the user that ended its process."""
    script = "echo 'ratchet.errors.ConfigError: vLLM has no such output parser: qwen4'; sleep 2; exit 1"
    stack = FewParts(home, Part("adapter", ["sh", "-c", script], 40))
    (home / "logs").mkdir()
    (home / "logs" / "adapter.log").write_text("ratchet.errors.ConfigError: of last week\n")
    starts = log_sizes(stack)
    async with watched(stack):
        with pytest.raises(MachineError, match=r"adapter does not come up.*vLLM has no such output parser: qwen4"):
            await wait_until_answering(stack, starts, print)


async def test_up_ends_without_a_watcher(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no part is known to answer, so waiting on is useless."""
    monkeypatch.setattr(readiness, "_WATCHER_SECONDS", 1.0)
    stack = FewParts(home, Part("adapter", ["sleep", "1000"], 40))
    Supervisor(stack).up()
    try:
        with pytest.raises(MachineError, match=r"the watcher has written nothing to .*health\.json for"):
            await wait_until_answering(stack, log_sizes(stack), print)
    finally:
        Supervisor(stack).down()


async def test_up_returns_once_every_part_answers(home: Path) -> None:
    stack = FewParts(home, page_server(home, "time.sleep(0.1)"), Part("egress", ["sleep", "1000"], 40))
    starts = log_sizes(stack)
    async with watched(stack):
        await wait_until_answering(stack, starts, print)
        assert all(answers(part) for name, part in read_health(home).items() if name in ("egress", "temporal-ui"))


def test_up_ends_an_orphan_of_its_own_on_a_port_and_names_a_foreign_program(home: Path) -> None:
    stack = FewParts(home, page_server(home, "pass"))
    listen = f"import socket, time; s = socket.create_server(('127.0.0.1', {stack.ports['engine']})); time.sleep(1000)"
    stack.few = [Part("engine", ["sleep", "1000"], 40)]
    own = {**os.environ, "RATCHET_STACK": str(home)}
    foreign = {name: value for name, value in os.environ.items() if name != "RATCHET_STACK"}
    stack.ray_directory.mkdir()
    log = str(stack.ray_directory / "agent.log")
    opens = f"import os; log = open(os.environ['AGENT_LOG'], 'w'); {listen}"
    # The first has the stack's mark. The second has overwritten its environment, like some programs; the third its
    # command line, too, like Ray's agent.
    for variables, program in (
        (own, [listen]),
        (foreign, [listen, f"{home}/models"]),
        (foreign | {"AGENT_LOG": log}, [opens]),
    ):
        orphan = subprocess.Popen([sys.executable, "-c", *program], env=variables)
        _wait_until_listening(stack.ports["engine"])
        stack.keep_ports()
        orphan.wait(30)
        assert is_free(stack.ports["engine"])
    other = subprocess.Popen([sys.executable, "-c", listen], env=foreign)
    try:
        _wait_until_listening(stack.ports["engine"])
        with pytest.raises(
            MachineError, match=rf"\(engine\) is used by another program, process {other.pid} \(.*python"
        ):
            stack.keep_ports()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        shutil.rmtree(stack.ray_directory)


def _wait_until_listening(port: int) -> None:
    import socket

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_a_host_of_boxes_that_a_launch_adds_is_watched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = FewParts(home, Part("egress", ["sleep", "1000"], 40))
    closed = f"http://127.0.0.1:{stack.ports['front']}"
    for name, value in {"KEY": stack.box_host_key(), "API_URL": closed, "SANDBOX_URL": closed}.items():
        monkeypatch.setenv(f"E2B_{name}" if name != "KEY" else "E2B_API_KEY", value)

    def name_hosts(*names: str) -> None:
        (home / "new").write_text(json.dumps(dict.fromkeys(names, closed)))
        (home / "new").rename(home / BOX_HOSTS_FILE)

    name_hosts("10.0.0.2")
    async with watched(stack):
        for number in (1, 2):
            name_hosts("10.0.0.2", "10.0.0.3") if number == 2 else None
            parts = list(stack.box_gateways())
            assert len(parts) == number
            for part in parts:
                await wait_for(stack, part, lambda one: bool(one.reason), "is probed")


async def test_a_watcher_rests_while_no_run_is_open_and_every_part_answers(home: Path) -> None:
    stack = FewParts(home, Part("egress", ["sleep", "1000"], 40))
    async with watched(stack) as watcher:
        while watcher.external:  # there is neither a Postgres nor a Temporal elsewhere
            del watcher.health[watcher.external.pop()]
        watcher.probes.has_open_run = False
        await wait_for(stack, "egress", answers, "answers")
        watcher.busy_at -= 1000.0
        assert watcher.is_resting and watcher.look_seconds > 1.0
        await _until_looked(watcher)
        assert watcher.is_resting, "a look finds nothing to do"
        watcher.probes.has_open_run = True
        await _until_looked(watcher)
        assert not watcher.is_resting


async def _until_looked(watcher: Watcher) -> None:
    before = health_written_at(watcher.stack.home)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while health_written_at(watcher.stack.home) == before:
            await asyncio.sleep(0.05)
