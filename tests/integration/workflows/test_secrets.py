"""Secrets that are planted for an agent, a failing agent and the services are in no history, row, log or status."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import zstandard
from google.protobuf.json_format import MessageToJson
from sqlalchemy import select

from store.schema import Base
from tests.integration.workflows.conftest import ROOT, Loop
from tests.integration.workflows.test_rollout import PRE, call, finish

pytestmark = pytest.mark.timeout(600)

NAME = "AGENT_TOKEN"


async def texts_of_store(loop: Loop) -> str:
    """Return every value of every table as text, compressed ones unpacked."""
    found: list[str] = []
    async with loop.database.begin() as connection:
        for table in Base.metadata.sorted_tables:
            for row in await connection.execute(select(table)):
                found += [_text(value) for value in row]
    return "\n".join(found)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        with contextlib.suppress(zstandard.ZstdError):
            value = zstandard.decompress(value)
        return bytes(value).decode(errors="replace")
    return json.dumps(value, default=str)


async def texts_of_histories(loop: Loop) -> str:
    """Return the history of every workflow as JSON; payloads are base64 there, so they are added as they are."""
    found: list[str] = []
    async for listed in loop.client.list_workflows():
        handle = loop.client.get_workflow_handle(listed.id, run_id=listed.run_id)
        async for event in handle.fetch_history_events():
            found.append(MessageToJson(event))
            found += [part.decode(errors="replace") for part in _payloads(event)]
    return "\n".join(found)


def _payloads(message: Any) -> Iterator[bytes]:
    """Yield the data of every payload within a protobuf message."""
    if message.DESCRIPTOR.full_name == "temporal.api.common.v1.Payload":
        yield message.data
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            children = [value[key] for key in value]
        else:
            children = list(value) if field.is_repeated else [value]
        for child in children:
            if hasattr(child, "DESCRIPTOR"):
                yield from _payloads(child)


async def test_no_planted_secret_is_stored_or_shown(loop: Loop) -> None:
    planted = f"planted-{uuid4().hex}"
    (loop.home / "secrets.env").write_text(f"{NAME}={planted}\n")
    reference = {"harness": {"extra_env": {NAME: "${" + NAME + "}"}}}
    task = {"pre_commands": [PRE], "eval_cmd": f'test "$(cat a.txt)" = {len(planted)}'}
    await loop.script(call(f"echo ${{#{NAME}}} > a.txt"), "Done.")
    _, row = await finish(loop, await loop.start(loop.dataset(**task), **reference))
    assert (row.outcome, row.reward) == ("graded", 1.0), "the agent had the whole value"
    # An agent whose tool fails with the secret on its command line.
    await loop.script(call(f'curl --silent -H "${NAME}" http://127.0.0.1:9/ || exit 7'), "Done.")
    await finish(loop, await loop.start(loop.dataset(**task), **reference))

    status = subprocess.run(
        [sys.executable, "-m", "cli.main", "status", "--json"],
        cwd=ROOT,
        env=loop.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    logs = "\n".join(path.read_text(errors="replace") for path in loop.home.rglob("*.log"))
    places = {
        "store": await texts_of_store(loop),
        "histories": await texts_of_histories(loop),
        "logs": logs,
        "status": status.stdout + status.stderr,
    }
    assert NAME in places["store"] and NAME in places["histories"], "the references are there, so the search works"
    secrets = {"agent": planted, "gateway": loop.environment["E2B_API_KEY"]}
    found = [(name, place) for name, secret in secrets.items() for place, text in places.items() if secret in text]
    assert not found
