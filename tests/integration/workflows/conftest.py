"""The services of a rollout as processes: Postgres, Temporal, gateway, adapter, worker, and a scripted engine.

These tests are about workflows, boxes and verdicts, so the model's answers must be known. The fixtures end all
processes that they start.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from temporalio.client import Client, WorkflowHandle
from tokenizers import Tokenizer

from ratchet import temporal_client
from ratchet.errors import StoreUnavailableError
from ratchet.temporal_settings import TemporalSettings, load_temporal_settings
from ratchet.types import EngineState
from sandboxes.e2b import E2BProvider
from stack import temporal_namespace
from stack.parts import Stack
from stack.postgres import ensure_database
from store.database import Database
from store.migration import migrate
from store.schema import EngineTable, RolloutTable, TurnTable
from tests.free_ports import free_ports
from tests.replay.record import record_all
from tests.standins.collector import Collector
from tests.standins.tiny_model import make_tokenizer
from tests.temporal_services import own_temporal

ROOT = Path(__file__).parents[3]
_LOG_LINES = 20


def _short(directory: Path) -> Path:
    """Write temporal.yaml with retries of seconds instead of minutes."""
    settings = yaml.safe_load((ROOT / "temporal.yaml").read_text())
    for stage in settings["stages"].values():
        stage |= {"retry_initial": 0.1, "retry_max": 1}
    settings["train_run"]["poll"] = 2
    settings["sweep"] |= {"interval": 3600, "creating_grace": 0, "unknown_grace": 0, "max_share": 1.0}
    settings["rollout"]["ttl_margin"] = 60
    settings["retention"] |= {"turns_days": 30, "weights_days": 30}
    path = directory / "temporal.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="session")
async def client() -> AsyncIterator[Client]:
    """Of a server that has no other worker than those of a test with stand-in activities."""
    async with own_temporal() as client:
        yield client


@dataclass
class Loop:
    """Handles on the running services. `script`: what the engine answers next. `start`: start a rollout by plain
    JSON. `collector`: what worker and adapter export their spans to."""

    home: Path
    environment: dict[str, str]
    stack: Stack
    settings: TemporalSettings
    database: Database
    client: Client
    tokenizer: Tokenizer
    model: Path
    collector: Collector
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def spawn(self, part: str, *arguments: str) -> None:
        """Start `ratchet PART`, or the module that `arguments` name."""
        command = [sys.executable, "-m", *(arguments or ("cli.main", "part", part))]
        with self.log(part).open("ab") as log:
            self.processes[part] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=ROOT)

    def log(self, part: str) -> Path:
        return self.home / f"{part}.log"

    def last_words(self, part: str) -> str:
        return "\n".join(self.log(part).read_text(errors="replace").splitlines()[-_LOG_LINES:])

    def end(self, part: str, kill: bool = False) -> None:
        process = self.processes.pop(part)
        # SIGTERM lets Postgres wait for every client; SIGINT is its fast shutdown.
        process.send_signal(signal.SIGKILL if kill else signal.SIGINT if part == "postgres" else signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # a scripted engine still holds calls, for example
            process.kill()
            process.wait(10)

    async def script(self, *texts: str, **more: Any) -> None:
        stop = self.tokenizer.token_to_id("<|im_end|>")
        outputs = [
            {"ids": [*self.tokenizer.encode(text, add_special_tokens=False).ids, stop], **more} for text in texts
        ]
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await http.post(f"http://127.0.0.1:{self.stack.ports['engine']}/script", json={"outputs": outputs})

    async def forget_script(self) -> None:
        """Drop the answers that no agent has asked for, because it was ended before."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await http.post(f"http://127.0.0.1:{self.stack.ports['engine']}/reset")

    async def release(self, hold: str) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await http.post(f"http://127.0.0.1:{self.stack.ports['engine']}/release", json={"hold": hold})

    def dataset(self, **metadata: Any) -> str:
        """Write a dataset of one row and return its path. Its test command prints its result as TAP has it: a silent
        one decides nothing unless its task was examined.
        """
        if str(metadata.get("eval_cmd", "")).startswith(("test ", "true", "false", "sleep ")):
            metadata["eval_cmd"] = f"({metadata['eval_cmd']}) && echo 'ok 1' || {{ echo 'not ok 1'; exit 1; }}"
        row = {
            "prompt": "make it right",
            "label": "task",
            "metadata": {"image": "host", "workdir": "/workspace/repo", **metadata},
        }
        path = self.home / f"{uuid4().hex[:8]}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return str(path)

    async def start(self, dataset: str, **config: Any) -> WorkflowHandle[Any, Any]:
        """Start a workflow by plain JSON, as the stock CLI does."""
        values = {"model": str(self.model), "limits": {"agent_seconds": 60, "eval_seconds": 20}, **config}
        argument = {"dataset": dataset, "task": 0, "config": values}
        return await self.client.start_workflow(
            "Rollout", argument, id=f"rollout/adhoc/{uuid4().hex[:8]}", task_queue="control"
        )

    def provider(self) -> E2BProvider:
        return E2BProvider(*(self.environment[name] for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL")))

    async def rollout(self, handle: WorkflowHandle[Any, Any]) -> Any:
        async with self.database.begin() as connection:
            return (
                await connection.execute(select(RolloutTable).where(RolloutTable.workflow_id == handle.id))
            ).one_or_none()

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 240) -> Any:
        """Poll an async condition until it is true."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not (found := await condition()):
            self.require_alive()
            assert loop.time() < deadline, f"timed out waiting until {what}"
            await asyncio.sleep(0.1)
        return found

    async def until_a_call_waits(self, handle: WorkflowHandle[Any, Any]) -> None:
        """Wait until a model call of the rollout is with the engine, which the script holds."""

        async def waits() -> bool:
            row = await self.rollout(handle)
            if row is None:
                return False
            async with self.database.begin() as connection:
                statement = select(func.count()).where(TurnTable.rollout_id == row.id, TurnTable.state == "in_flight")
                return bool((await connection.execute(statement)).scalar_one())

        await self.until(waits, "the agent waits for its model")

    async def result(
        self, handle: WorkflowHandle[Any, Any], seconds: float = 400, by: Awaitable[Any] | None = None
    ) -> Any:
        """Return the workflow's result, which `by` waits for instead of the handle if it is given.

        Raise AssertionError if a part that the workflow needs has died, since nothing restarts it here.
        """
        result = asyncio.ensure_future(handle.result() if by is None else by)
        try:
            async with asyncio.timeout(seconds):
                while not (await asyncio.wait({result}, timeout=1))[0]:
                    self.require_alive()
            return await result
        finally:
            result.cancel()

    def require_alive(self) -> None:
        for part, process in self.processes.items():
            assert process.poll() is None, (
                f"{part} has ended by itself, exit code {process.returncode}: {self.last_words(part)}"
            )

    async def answers(self, address: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
                return (await http.get(address)).is_success
        return False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the last log lines of the services to a failed test's report."""
    outcome: Any = yield
    report, loop = outcome.get_result(), getattr(item, "funcargs", {}).get("loop")
    if report.failed and loop is not None:
        for part in sorted(loop.processes):
            report.sections.append((f"end of {part}.log", loop.last_words(part)))


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="ratchet-loop-"))
    directory.chmod(0o755)
    free_ports(directory)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tokenizer(directory)
    (directory / "config.json").write_text("{}")  # its weights are not loaded
    return directory


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def _serving_plan(home: Path, model: Path) -> None:
    from ratchet.config import RunConfig
    from stack.serving_plan import ServingPlan, write_plan

    config = RunConfig.model_validate({"model": str(model), "datasets": [{"path": "unused"}]})
    write_plan(Stack(home), ServingPlan(config=config, model_path=model))


async def _engine_row(database: Database, address: str, model: Path) -> None:
    """Register the scripted engine as a real one and keep its heartbeat fresh."""
    values = {"state": EngineState.READY, "model_path": str(model), "details": {}}
    async with database.begin() as connection:
        await connection.execute(
            insert(EngineTable)
            .values(address=address, **values)
            .on_conflict_do_update(index_elements=["address", "engine_set"], set_=values)
        )
    while True:
        with contextlib.suppress(StoreUnavailableError):
            async with database.begin() as connection:
                await connection.execute(
                    update(EngineTable).where(EngineTable.address == address).values(heartbeat_at=func.now())
                )
        await asyncio.sleep(2)


@pytest.fixture(scope="session")
async def loop(home: Path, model: Path, collector: Collector, own_environment: dict[str, str]) -> AsyncIterator[Loop]:
    stack = Stack(home)
    settings = load_temporal_settings(_short(home)).model_copy(
        update={"address": f"127.0.0.1:{stack.ports['temporal']}"}
    )
    environment = {
        **os.environ,
        **stack.environment(),
        "RATCHET_HOME": str(home),  # a test that ran before in this process may have set another
        "RATCHET_TEMPORAL_CONFIG": str(home / "temporal.yaml"),
        "NO_PROXY": "127.0.0.1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "RATCHET_LOG_FORMAT": "json",
    } | own_environment
    _serving_plan(home, model)
    url = environment["RATCHET_DATABASE_URL"]
    found = Loop(
        home,
        environment,
        stack,
        settings,
        Database(url, pool_size=3),
        None,
        Tokenizer.from_file(str(model / "tokenizer.json")),
        model,
        collector,
    )  # type: ignore[arg-type]
    keeper: asyncio.Task[None] | None = None
    try:
        for part in ("postgres", "temporal", "gateway", "adapter"):
            found.spawn(part)
        found.spawn("engine", "tests.standins.engine", str(stack.ports["engine"]))
        await ensure_database(stack.ports["postgres"])
        await asyncio.to_thread(migrate, url)
        found.client = await temporal_client.connect_temporal(settings, wait_seconds=60)
        await temporal_namespace.prepare_namespace(found.client, found.database, settings, is_own=True)
        found.spawn("worker")
        for part in ("gateway", "adapter"):
            await found.until(
                lambda part=part: found.answers(f"http://127.0.0.1:{stack.ports[part]}/health"), f"{part} answers"
            )
        keeper = asyncio.create_task(_engine_row(found.database, f"http://127.0.0.1:{stack.ports['engine']}", model))
        yield found
        if os.environ.get("RATCHET_RECORD_HISTORIES"):
            await record_all(found.client, stack, Path(os.environ["RATCHET_RECORD_HISTORIES"]))
    finally:
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await keeper
        await found.database.close()
        await _end_boxes(found)
        for part in reversed(list(found.processes)):
            found.end(part)


async def _end_boxes(found: Loop) -> None:
    from cli.down import kill_stack_boxes

    with contextlib.suppress(Exception):
        await kill_stack_boxes(found.environment)
