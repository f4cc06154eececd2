"""Real Postgres, a tiny model directory, scripted engines and adapters for the adapter's integration tests.

Every process that is started here is ended here.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from sqlalchemy import func, insert, select, text

from adapter.app import create_adapter_app, server_config
from adapter.prompt.renderer import Renderer
from adapter.served_sets import ReadSets, renderer_of
from adapter.settings import AdapterSettings
from ratchet.config_engines import DEFAULT_SET
from stack.ports import free_port
from store import sessions
from store.database import Database
from store.schema import EngineTable, RolloutTable, RunTable, TaskTable, TurnTable
from tests.standins.tiny_model import make_tokenizer
from tests.unit.adapter.prompt.test_prompt_builder import KEEPING


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    """The tests of this folder run on the event loop that `ratchet part adapter` runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def keeping_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows the thinking of all answers."""
    directory = tmp_path_factory.mktemp("keeping")
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(KEEPING)
    return directory


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir)


@dataclass
class ScriptedEngine:
    """A running scripted engine, registered as ready."""

    id: int
    address: str
    process: subprocess.Popen[bytes]
    renderer: Renderer

    def ids(self, text: str, stop: bool = True) -> list[int]:
        """The ids of `text`, in which control tokens have their own names, and the stop id."""
        tokenizer = self.renderer.tokenizer.plain
        end = [tokenizer.token_to_id("<|im_end|>")] if stop else []
        return [*tokenizer.encode(text, add_special_tokens=False).ids, *end]

    async def script(self, *outputs: dict[str, Any]) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(self.address + "/script", json={"outputs": list(outputs)})

    async def say(self, *texts: str) -> None:
        await self.script(*({"ids": self.ids(one)} for one in texts))

    async def release(self, hold: str) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(self.address + "/release", json={"hold": hold})

    async def hold_updates(self) -> None:
        """Let weight updates last until `release("update")`."""
        async with httpx.AsyncClient(timeout=60) as http:
            await http.post(self.address + "/script", json={"update": "hold"})

    async def seen(self) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=60) as http:
            return dict((await http.get(self.address + "/calls")).json())

    async def wait_for_calls(self, number: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(300):
            while len(calls := (await self.seen())["calls"]) < number:
                await asyncio.sleep(0.02)
        return list(calls)


@contextlib.asynccontextmanager
async def engine_process(num_slots: int = 0) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    arguments = [str(port), "127.0.0.1", str(num_slots)]
    process = subprocess.Popen([sys.executable, "-m", "tests.standins.engine", *arguments])
    address = f"http://127.0.0.1:{port}"
    try:
        await wait_for_http(address + "/health", process)
        yield address, process
    finally:
        process.kill()
        process.wait()


async def register(
    database: Database,
    renderer: Renderer,
    address: str,
    process: subprocess.Popen[bytes],
    *texts: str,
    engine_set: str = DEFAULT_SET,
) -> ScriptedEngine:
    """Register an engine that is ready for an hour, and that answers with `texts` and nothing else."""
    async with httpx.AsyncClient(timeout=60) as http:
        await http.post(address + "/restart")
    engine = ScriptedEngine(0, address, process, renderer)
    await engine.say(*texts)
    async with database.begin() as conn:
        values = {
            "address": address,
            "engine_set": engine_set,
            "state": "ready",
            "model_path": "",
            "heartbeat_at": func.now() + text("interval '1 hour'"),
        }
        engine.id = (await conn.execute(insert(EngineTable).values(**values).returning(EngineTable.id))).scalar_one()
    return engine


async def wait_for_http(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(600), httpx.AsyncClient(timeout=60) as http:
        while True:
            assert process.poll() is None, f"the process behind {url} ended"
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="session")
async def shared_engine() -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    async with engine_process() as process:
        yield process


@pytest.fixture
async def engine(
    database: Database, renderer: Renderer, shared_engine: tuple[str, subprocess.Popen[bytes]]
) -> ScriptedEngine:
    return await register(database, renderer, *shared_engine)


def adapter_settings(postgres_url: str, model_dir: Path, **changes: Any) -> AdapterSettings:
    values = {
        "database_url": postgres_url,
        "model_path": model_dir,
        "port": free_port(),
        "tool_parser": None,
        "ping_seconds": 0.2,
    }
    return AdapterSettings.model_validate(values | {"lease_seconds": 1.5} | changes)


_RENDERERS: dict[str, Renderer] = {}


def renderer_once(settings: AdapterSettings) -> Renderer:
    """The renderer of these settings and files. Each adapter of the product checks its template again at start."""
    files = {path.name: path.stat().st_mtime_ns for path in settings.model_path.iterdir()}
    key = repr((settings.model_path, settings.template_kwargs, settings.stop_token_ids, sorted(files.items())))
    if key not in _RENDERERS:
        _RENDERERS[key] = renderer_of(settings)
    return _RENDERERS[key]


@contextlib.asynccontextmanager
async def adapter_here(settings: AdapterSettings, read_sets: ReadSets | None = None) -> AsyncIterator[str]:
    """Serve the app on a real socket, in this process."""
    database = Database(settings.database_url, settings.pool_size)
    app = create_adapter_app(settings, database, read_sets=read_sets, make_renderer=renderer_once)
    server = uvicorn.Server(server_config(app, settings))
    # type: ignore[method-assign, assignment]  # signals stay with pytest
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(300):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://{settings.host}:{settings.port}"
    finally:
        server.should_exit = True
        await task
        await database.close()


@contextlib.asynccontextmanager
async def adapter_process(settings: AdapterSettings) -> AsyncIterator[subprocess.Popen[bytes]]:
    program = (
        "import sys; from adapter.app import run_adapter; from adapter.settings import AdapterSettings; "
        "run_adapter(AdapterSettings.model_validate_json(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, settings.model_dump_json()])
    try:
        await wait_for_http(f"http://{settings.host}:{settings.port}/health", process)
        yield process
    finally:
        process.kill()
        process.wait()


class Line:
    """A network line between two processes that can be cut. New connections go to `port`.

    `loses_answer_with`: the line is cut instead of passing the first answer that has these bytes. `sent`: all bytes
    that clients have sent.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_whole = True
        self.loses_answer_with: bytes | None = None
        self.sent = bytearray()
        self.open: set[asyncio.StreamWriter] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_whole:
            writer.close()
            return
        there = await asyncio.open_connection("127.0.0.1", self.port)
        self.open |= {writer, there[1]}
        await asyncio.gather(self._pass_on(reader, there[1], self.sent), self._pass_on(there[0], writer))

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None = None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if record is not None:
                    record += data
                if self.loses_answer_with and self.loses_answer_with in data:
                    self.loses_answer_with = None
                    self.cut()
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        self.is_whole = False
        for writer in self.open:
            writer.transport.abort()

    def mend(self) -> None:
        self.is_whole = True


@contextlib.asynccontextmanager
async def line_to(port: int) -> AsyncIterator[tuple[int, Line]]:
    """Open a line to `port`; yields the port of the line, and the line."""
    line = Line(port)
    server = await asyncio.start_server(line.connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], line
    finally:
        line.cut()
        server.close()


@contextlib.asynccontextmanager
async def cut_off(url: str) -> AsyncIterator[tuple[str, Line]]:
    """Give the store an address behind a line that can be cut; yields both."""
    port = int(httpx.URL(url).port or 0)
    async with line_to(port) as (line_port, line):
        yield url.replace(f":{port}/", f":{line_port}/"), line


@pytest.fixture
async def adapter(postgres_url: str, model_dir: Path, database: Database) -> AsyncIterator[str]:
    async with adapter_here(adapter_settings(postgres_url, model_dir)) as address:
        yield address


@pytest.fixture
async def thinking(postgres_url: str, model_dir: Path, database: Database) -> AsyncIterator[str]:
    """An adapter that parses tool calls and thinking with vLLM's parsers."""
    settings = adapter_settings(postgres_url, model_dir, tool_parser="qwen3_coder", reasoning_parser="qwen3")
    async with adapter_here(settings) as address:
        yield address


@dataclass
class Opened:
    """A rollout with an open session."""

    rollout_id: int
    session_id: int
    token: str
    database: Database

    async def turns(self) -> list[Any]:
        async with self.database.begin() as conn:
            return list(
                await conn.execute(
                    select(TurnTable.__table__).where(TurnTable.session_id == self.session_id).order_by(TurnTable.id)
                )
            )

    async def wait_delivered(self, number: int) -> list[Any]:
        async with asyncio.timeout(300):
            while True:
                turns = await self.turns()
                if sum(turn.delivered for turn in turns) >= number:
                    return turns
                await asyncio.sleep(0.02)


LIMITS = {"max_context_tokens": 2000, "max_response_tokens": 100, "min_response_tokens": 8, "max_turns": None}


async def open_rollout(
    database: Database, member: int = 0, run_id: str = "run-1", engine_set: str = DEFAULT_SET, **limits: Any
) -> Opened:
    async with database.begin() as conn:
        run = {"run_id": run_id, "config": {}, "config_digest": "", "config_name": "", "seed": 0, "model_path": ""}
        if not (await conn.execute(select(RunTable.run_id).where(RunTable.run_id == run_id))).first():
            await conn.execute(insert(RunTable).values(**run, engine_set=engine_set))
        task = {"dataset": "d", "dataset_digest": "d", "row_digest": f"r{member}", "row_no": member, "spec": {}}
        task |= {name: "" for name in ("label", "image", "workdir", "grader")}
        task_id = (await conn.execute(insert(TaskTable).values(**task).returning(TaskTable.id))).scalar_one()
        rollout = {
            "run_id": run_id,
            "task_id": task_id,
            "member": member,
            "purpose": "train",
            "workflow_id": f"w{member}",
        }
        rollout |= {"harness": "test", "temperature": 1.0}
        rollout_id = (
            await conn.execute(insert(RolloutTable).values(**rollout).returning(RolloutTable.id))
        ).scalar_one()
        session_id = await sessions.open_session(conn, rollout_id, 1, 0.7, "policy", LIMITS | limits)
        token = await sessions.add_token(conn, session_id)
    return Opened(rollout_id, session_id, token, database)


@pytest.fixture
async def opened(database: Database) -> Opened:
    return await open_rollout(database)
