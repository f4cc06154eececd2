"""The stack of the benchmarks of orchestration and overload: Postgres, Temporal's server, adapter and worker are real;
the engine is scripted, and boxes are scripted or the gateway's.
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
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psutil
import yaml
from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from temporalio.client import Client
from tokenizers import Tokenizer

from ratchet import temporal_client
from ratchet.config import RunConfig
from ratchet.errors import StoreUnavailableError
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import EngineState, policy_version
from sandbox_gateway.box_end import kill_processes, living_boxes
from stack import temporal_namespace
from stack.parts import Stack
from stack.ports import free_port
from stack.postgres import ensure_database
from stack.serving_plan import ServingPlan, write_plan
from store.database import Database
from store.migration import migrate
from store.schema import EngineTable, EvaluationTable, RolloutTable
from tests.free_ports import free_ports
from tests.standins.scripted_boxes import URL_VARIABLE
from tests.standins.tiny_model import make_tokenizer

ROOT = Path(__file__).parents[2]
CONTROL_PLANE = ("worker", "temporal", "postgres", "adapter")
"""Parts whose CPU counts. Boxes and engine are stand-ins."""
_START_SECONDS = 240.0
_BOX_END_SECONDS = 10.0


class OrchestrationStack:
    """All state is in `home`. `at_once`: boxes that may exist at once. `real_boxes`: those of the gateway, in which the
    bash agent works; otherwise boxes are scripted. `beside_postgres`: variables of every part but Postgres."""

    tool_parser = "hermes"

    def __init__(self, home: Path, at_once: int, real_boxes: bool) -> None:
        self.run_id = f"orchestration-{uuid4().hex[:6]}"
        free_ports(home)
        self.home = home
        self.at_once = at_once
        self.stack = Stack(home)
        self.boxes_port = free_port()
        self.real_boxes = real_boxes
        self.beside_postgres: dict[str, str] = {}
        self.around: Any = None
        (home / "temporal.yaml").write_text(yaml.safe_dump(self._settings()))
        self.settings = load_temporal_settings(home / "temporal.yaml").model_copy(
            update={"address": f"127.0.0.1:{self.stack.ports['temporal']}"}
        )
        self.environment = {
            **os.environ,
            **self.stack.environment(),
            "RATCHET_TEMPORAL_CONFIG": str(home / "temporal.yaml"),
            "NO_PROXY": "127.0.0.1",
        }
        if not real_boxes:
            self.environment["RATCHET_SANDBOX_PROVIDER"] = "tests.standins.scripted_boxes:make_provider"
            self.environment[URL_VARIABLE] = f"http://127.0.0.1:{self.boxes_port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended_cpu: dict[str, float] = {}
        self.database = Database(self.environment["RATCHET_DATABASE_URL"], pool_size=2)
        self.model = home / "model"

    def _settings(self) -> Any:
        settings = yaml.safe_load((ROOT / "temporal.yaml").read_text())
        for queue in ("agent", "grade", "boot"):
            settings["queues"][queue]["slots"] = max(self.at_once, settings["queues"][queue]["slots"])
        settings["train_run"]["poll"] = 5
        settings["sweep"]["interval"] = 3600
        return settings

    # ------------------------------------------------------------ processes

    def spawn(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", *(arguments or ("cli.main", "part", name))]
        environment = self.environment | ({} if name == "postgres" else self.beside_postgres)
        with (self.home / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)

    def end(self, name: str, kill: bool = False) -> None:
        process = self.processes.pop(name)
        self.ended_cpu[name] = self.ended_cpu.get(name, 0.0) + _tree_cpu(process.pid)
        process.send_signal(signal.SIGKILL if kill else signal.SIGINT if name == "postgres" else signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of each part of the control plane so far, with its lives that were ended."""
        return {
            name: self.ended_cpu.get(name, 0.0)
            + (_tree_cpu(self.processes[name].pid) if name in self.processes else 0.0)
            for name in CONTROL_PLANE
        }

    async def start(self, num_turns: int) -> Client:
        make_tokenizer(self.model)
        (self.model / "config.json").write_text("{}")
        config = RunConfig.model_validate(
            {"model": str(self.model), "datasets": [{"path": "unused"}], "engine": {"tool_parser": self.tool_parser}}
        )
        write_plan(self.stack, ServingPlan(config=config, model_path=self.model))
        for name in ("postgres", "temporal"):
            self.spawn(name)
        await ensure_database(self.stack.ports["postgres"])
        await asyncio.to_thread(migrate, self.environment["RATCHET_DATABASE_URL"])
        client = await temporal_client.connect_temporal(self.settings, wait_seconds=_START_SECONDS)
        await temporal_namespace.prepare_namespace(client, self.database, self.settings, is_own=True)
        adapter = f"http://127.0.0.1:{self.stack.ports['adapter']}"
        self.spawn("adapter")
        self.start_engine()
        if self.real_boxes:
            boxes = self.environment["E2B_API_URL"]
            self.spawn("gateway")
        else:
            boxes = self.environment[URL_VARIABLE]
            self.spawn("boxes", "tests.standins.scripted_boxes", str(self.boxes_port), adapter, str(num_turns))
        self.spawn("worker")
        for address in (adapter, self.engine, boxes):
            await _until_answering(f"{address}/health")
        await self.script_engine()
        return client

    def start_engine(self) -> None:
        self.spawn("engine", "tests.standins.bulk_engine", str(self.stack.ports["engine"]))

    @property
    def engine(self) -> str:
        return f"http://127.0.0.1:{self.stack.ports['engine']}"

    async def script_engine(self) -> None:
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        stop = tokenizer.token_to_id("<|im_end|>")
        texts = [f"I look at file {number}." for number in range(7)]
        if self.real_boxes:  # a rollout ends with each third answer, after none to several commands
            call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l; echo two > a.txt"}}\n</tool_call>'
            texts = [call, call, "Done."]
        outputs = [[*tokenizer.encode(one, add_special_tokens=False).ids, stop] for one in texts]
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"{self.engine}/texts", json={"outputs": outputs, "hold_seconds": [0.05, 0.5]})

    async def keep_engine(self) -> None:
        """Register the engine, as one that serves the run's weights already, and keep its heartbeat fresh."""
        version = policy_version(self.run_id, 0, 0)
        values = {"state": EngineState.READY, "model_path": str(self.model), "details": {}, "version": version}
        row = insert(EngineTable).values(address=self.engine, **values)
        fresh = update(EngineTable).values(heartbeat_at=func.now())
        while True:
            with contextlib.suppress(StoreUnavailableError):
                async with self.database.begin() as connection:
                    await connection.execute(row.on_conflict_do_nothing())
                    await connection.execute(fresh)
            await asyncio.sleep(2)

    async def close(self) -> None:
        await self.database.close()
        for name in reversed(list(self.processes)):
            self.end(name)
        for directory in living_boxes(self.home / "boxes"):
            kill_processes(directory, _BOX_END_SECONDS)

    # ------------------------------------------------------------ the evaluation

    def evaluation(self, num_rollouts: int, samples: int) -> dict[str, Any]:
        """Return the config of a run that evaluates `num_rollouts` rollouts."""
        num_tasks = max(1, num_rollouts // samples)
        metadata = {"image": "host", "workdir": "/workspace/repo", "eval_cmd": "echo ok 1"}
        if self.real_boxes:
            commit = "git -c user.name=x -c user.email=x@x commit -qm first"
            metadata |= {"pre_commands": [f"git init -q . && echo one > a.txt && git add -A && {commit}"]}
        row = {"prompt": "make it right", "metadata": metadata}
        path = self.home / "tasks.jsonl"
        path.write_text("".join(json.dumps({**row, "label": f"task {n}"}) + "\n" for n in range(num_tasks)))
        return {
            "model": str(self.model),
            "datasets": [{"path": str(path), "use": "eval"}],
            "grading": {"admission": "ignored"},
            "sandbox": {"max_boxes": self.at_once},
            "training": {"steps": 0},
            "evaluation": {"at": ["start"], "temperatures": [1.0], "samples": samples},
        }

    async def num_ended(self) -> int:
        async with self.database.begin() as connection:
            return int(
                (
                    await connection.execute(
                        select(func.count()).select_from(RolloutTable).where(RolloutTable.outcome.is_not(None))
                    )
                ).scalar_one()
            )

    async def verdicts(self) -> dict[str, Any]:
        """Return what shows whether every rollout has one verdict and counts once."""
        async with self.database.begin() as connection:
            outcomes = await connection.execute(
                select(RolloutTable.outcome, RolloutTable.replaced_by.is_(None), func.count()).group_by(
                    RolloutTable.outcome, RolloutTable.replaced_by.is_(None)
                )
            )
            counts = [{"outcome": row[0], "counted": row[1], "rollouts": row[2]} for row in outcomes]
            several = "SELECT count(*) FROM (SELECT patch_id FROM grade GROUP BY patch_id HAVING count(*) > 1) AS twice"
            members = (
                "SELECT count(*) FROM (SELECT group_id, member FROM rollout WHERE replaced_by IS NULL"
                " GROUP BY group_id, member HAVING count(*) > 1) AS twice"
            )
            return {
                "rollouts": counts,
                "patches_with_several_grades": (await connection.execute(text(several))).scalar_one(),
                "members_that_count_twice": (await connection.execute(text(members))).scalar_one(),
                "evaluations_ended": (
                    await connection.execute(
                        select(func.count()).select_from(EvaluationTable).where(EvaluationTable.ended_at.is_not(None))
                    )
                ).scalar_one(),
            }


def _tree_cpu(pid: int) -> float:
    """CPU seconds of a process, the children that it has waited for, and its living descendants."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


async def _until_answering(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    async with httpx.AsyncClient(trust_env=False) as http:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(url)).is_success:
                    return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


@contextlib.asynccontextmanager
async def orchestration_stack(
    at_once: int,
    num_turns: int,
    real_boxes: bool = False,
    around: Callable[[OrchestrationStack], AbstractAsyncContextManager[Any]] | None = None,
    kind: type[OrchestrationStack] = OrchestrationStack,
) -> AsyncIterator[tuple[OrchestrationStack, Client]]:
    """Start the stack in a new directory, and remove both at the end; `around` is entered before the first part."""
    home = Path(tempfile.mkdtemp(prefix="ratchet-orchestration-"))
    home.chmod(0o755)  # the embedded Postgres runs as another user
    found = kind(home, at_once, real_boxes)
    os.environ["RATCHET_HOME"] = str(home)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        stack.push_async_callback(found.close)
        if around is not None:
            found.around = await stack.enter_async_context(around(found))
        client = await found.start(num_turns)
        keeper = asyncio.create_task(found.keep_engine())
        stack.callback(keeper.cancel)
        yield found, client
