"""Record one history of every workflow from a running stack: `python -m tests.replay.record`.

Run it after an intended change of a workflow's commands, on a stack with a finished run, an admission and a regrade;
other workflows keep their recorded history. `test_histories.py` replays them. Payloads keep their shape; names of the
machine (paths, host, process) are replaced.
"""

import asyncio
import base64
import gzip
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowExecution

from ratchet import paths
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.startup import connect_stack

HISTORIES = Path(__file__).parent / "histories"
NAMES = ("rollout", "rollout_group", "evaluate", "train_run", "sweep", "admit_tasks", "regrade", "build_image")


def _without_machine(text: str, stack: Stack) -> str:
    names = {
        str(stack.home): "/state",
        str(Path.cwd()): "/checkout",
        str(paths.cache()): "/cache",
        sys.base_prefix: "/python",
        socket.gethostname(): "host",
    }
    for here, there in names.items():
        text = text.replace(here, there)
    text = re.sub(r"/tmp/ratchet-upgrade-\w+", "/upgrade", text)
    text = re.sub(r"/tmp/pytest-of-\w+/pytest-\d+", "/pytest", text)
    return re.sub(r"\d+@host", "1@host", text)


def _clean(value: Any, stack: Stack) -> Any:
    """Return the history as JSON, without the machine's names in its payloads, which are base64."""
    if isinstance(value, list):
        return [_clean(item, stack) for item in value]
    if isinstance(value, str):
        return _without_machine(value, stack)
    if isinstance(value, dict):
        cleaned = {key: _clean(item, stack) for key, item in value.items()}
        if isinstance(value.get("data"), str) and "metadata" in value:
            data = base64.b64decode(value["data"]).decode("utf-8", "replace")
            cleaned |= {
                "metadata": value["metadata"],
                "data": base64.b64encode(_without_machine(data, stack).encode()).decode(),
            }
        return cleaned
    return value


async def _record(client: Client, stack: Stack, name: str) -> None:
    kind = name.title().replace("_", "")
    query = f'WorkflowType = "{kind}" AND ExecutionStatus = "Completed"'
    async for found in client.list_workflows(query, page_size=1):
        await _write(client, stack, found, HISTORIES / f"{name}.json.gz")
        return
    print(f"{name}: nothing found")


async def _write(client: Client, stack: Stack, found: WorkflowExecution, path: Path) -> None:
    history = await client.get_workflow_handle(found.id, run_id=found.run_id).fetch_history()
    value = {"workflow_id": found.id, "history": _clean(json.loads(history.to_json()), stack)}
    path.write_bytes(gzip.compress(json.dumps(value).encode(), mtime=0))
    print(f"{path.name}: {found.id}, {len(history.events)} events")


async def record_all(client: Client, stack: Stack, folder: Path) -> None:
    """Write the history of every workflow of the namespace to `folder`, for choosing ones with rare branches.

    The tests of workflows and of upgrades call it if RATCHET_RECORD_HISTORIES names a folder. What is kept gets the
    name `<workflow>.<branch>.json.gz` in `histories/`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    async for found in client.list_workflows(""):
        name = found.id.replace("/", "_")
        status = found.status.name.lower() if found.status else "unknown"
        await _write(client, stack, found, folder / f"{found.workflow_type}.{status}.{name}.{found.run_id[:4]}.json.gz")


async def main() -> None:
    stack = Stack()
    client = await connect_stack(stack, load_temporal_settings())
    for name in NAMES:
        await _record(client, stack, name)


if __name__ == "__main__":
    asyncio.run(main())
