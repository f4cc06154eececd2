"""Rollouts with encrypted payloads: what Temporal stores, keys that are replaced, and a worker with a wrong key."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from temporalio.client import WorkflowHandle

from ratchet import temporal_client
from ratchet.payload_codec import KEY_FILE_SETTING, PayloadKeyError
from stack import temporal_namespace
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, call

KEYS = {name: f"{name}:{base64.b64encode(name.encode() * 8).decode()}\n" for name in ("old1", "new2", "odd3")}


@pytest.fixture
async def key_file(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """The setting for this process and for the workers that a test starts; afterwards all goes on without it."""
    path = tmp_path / "payload_keys"
    path.write_text(KEYS["old1"])
    monkeypatch.setenv(KEY_FILE_SETTING, str(path))
    loop.environment[KEY_FILE_SETTING] = str(path)
    plain = loop.client
    yield path
    del loop.environment[KEY_FILE_SETTING]
    loop.client = plain
    # A schedule without encryption again, as an administrator would make it.
    await plain.get_schedule_handle(loop.settings.own("sweep")).delete()
    await temporal_namespace.prepare_namespace(plain, loop.database, loop.settings, is_own=True)
    loop.end("worker")
    loop.spawn("worker")


async def restart(loop: Loop) -> None:
    """Do what `ratchet up` does after the key file has changed: sign the schedule, restart the worker."""
    loop.client = await temporal_client.connect_temporal(loop.settings, wait_seconds=60)
    await temporal_namespace.prepare_namespace(loop.client, loop.database, loop.settings, is_own=True)
    loop.end("worker")
    loop.spawn("worker")


async def begin(loop: Loop, hold: str) -> WorkflowHandle[Any, Any]:
    """Start a rollout whose first model call the engine holds, and wait for that call."""
    await loop.script(call("echo two > a.txt"), hold=hold)
    await loop.script("Done.")
    handle = await loop.start(loop.dataset(**TASK))
    await loop.until_a_call_waits(handle)
    return handle


async def key_ids(handle: WorkflowHandle[Any, Any]) -> set[str]:
    """Return the ids of the keys with which the payloads of a history are encrypted; empty for one that is not."""
    found: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict) and "encoding" in (metadata := value.get("metadata") or {}):
            found.add(base64.b64decode(metadata.get("encryption-key-id", "")).decode())
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            look(inner)

    for event in (await handle.fetch_history()).events:
        attributes = MessageToDict(event)
        attributes.pop("markerRecordedEventAttributes", None)  # the names of patches, which the SDK's core writes
        for name in ("workflowExecutionStartedEventAttributes", "upsertWorkflowSearchAttributesEventAttributes"):
            attributes.get(name, {}).pop("searchAttributes", None)
        look(attributes)
    return found


async def solved(loop: Loop, handle: WorkflowHandle[Any, Any]) -> bool:
    result = await loop.result(loop.client.get_workflow_handle(handle.id))  # with the keys of the newest client
    row = await loop.rollout(handle)
    assert (result["outcome"], result["reward"]) == (row.outcome, row.reward)
    return (row.outcome, row.reward, row.attempt) == ("graded", 1.0, 1)


async def test_a_rollout_that_began_without_keys_goes_on_with_them(loop: Loop, key_file: Path) -> None:
    handle = await begin(loop, "codec-plain")
    await restart(loop)
    await loop.release("codec-plain")
    assert await solved(loop, handle)
    assert await key_ids(handle) == {"", "old1"}


async def stored_bytes(handle: WorkflowHandle[Any, Any]) -> bytes:
    """Return all that Temporal gives away of a workflow: its history, and its description with memo and activities."""
    events = (await handle.fetch_history()).events
    return b"".join(one.SerializeToString() for one in (*events, (await handle.describe()).raw_description))


async def test_nothing_of_a_rollout_is_in_plain_text(loop: Loop, key_file: Path) -> None:
    texts = (b".jsonl", b"used_seconds", b"agent box", b"solved")
    plain = await begin(loop, "codec-plain-text")
    await loop.release("codec-plain-text")
    assert await solved(loop, plain)
    stored = await stored_bytes(plain)
    assert [text for text in texts if text not in stored] == [], "the texts are in histories without keys"
    await restart(loop)
    handle = await begin(loop, "codec-encrypted")
    assert (await loop.client.get_workflow_handle(handle.id).query("state"))["stage"] == "agent"
    stored = await stored_bytes(handle)  # with the heartbeat of the pending activity
    await loop.release("codec-encrypted")
    assert await solved(loop, handle)
    stored += await stored_bytes(handle)
    assert [text for text in texts if text in stored] == [] and await key_ids(handle) == {"old1"}


async def test_a_key_is_replaced_in_mid_run(loop: Loop, key_file: Path) -> None:
    await restart(loop)
    handle = await begin(loop, "codec-rotation")
    key_file.write_text(KEYS["old1"] + KEYS["new2"])
    await restart(loop)
    await loop.release("codec-rotation")
    assert await solved(loop, handle)
    assert await key_ids(handle) == {"old1", "new2"}


@pytest.mark.parametrize("file", ["other", "none"])
async def test_a_worker_without_the_key_waits(loop: Loop, key_file: Path, file: str, tmp_path: Path) -> None:
    await restart(loop)
    handle = await begin(loop, f"codec-{file}")
    loop.end("worker")
    said = loop.log("worker").stat().st_size
    if file == "other":
        loop.environment[KEY_FILE_SETTING] = str(tmp_path / "other_keys")
        (tmp_path / "other_keys").write_text(KEYS["odd3"])
    else:
        del loop.environment[KEY_FILE_SETTING]
    loop.spawn("worker")

    async def waits() -> bool:
        return b"add it as a line `old1:KEY`" in loop.log("worker").read_bytes()[said:]

    await loop.until(waits, "the worker says which key it lacks")
    await loop.release(f"codec-{file}")
    loop.environment[KEY_FILE_SETTING] = str(key_file)
    if file == "other":  # the key is added to the file of the living worker
        for path in (tmp_path / "other_keys", key_file):
            path.write_text(KEYS["old1"] + KEYS["odd3"])
    else:
        await restart(loop)
    assert await solved(loop, handle)


async def test_a_worker_that_meets_an_unknown_key_takes_no_more_work(
    loop: Loop, key_file: Path, tmp_path: Path
) -> None:
    """The client of another host encrypts with a key that this worker's file lacks."""
    await restart(loop)
    said = loop.log("worker").stat().st_size
    (tmp_path / "more_keys").write_text(KEYS["old1"] + KEYS["new2"])
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv(KEY_FILE_SETTING, str(tmp_path / "more_keys"))
        loop.client = await temporal_client.connect_temporal(loop.settings, wait_seconds=60)
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(loop.dataset(**TASK))

    async def waits() -> bool:
        return b"waiting for the keys" in loop.log("worker").read_bytes()[said:]

    await loop.until(waits, "the worker waits for the key")
    key_file.write_text(KEYS["old1"] + KEYS["new2"])
    assert await solved(loop, handle)


async def test_a_command_without_the_key_names_the_remedy(
    loop: Loop, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await restart(loop)
    handle = await begin(loop, "codec-command")
    monkeypatch.delenv(KEY_FILE_SETTING)
    blind = await temporal_client.connect_temporal(loop.settings)
    with pytest.raises(PayloadKeyError, match=f"`old1:KEY` to a file that {KEY_FILE_SETTING} names"):
        await blind.get_workflow_handle(handle.id).query("state")
    with pytest.raises(PayloadKeyError):
        await temporal_namespace.require_own_namespace(blind, loop.database, loop.settings, is_own=True)

    async def works() -> bool:
        (one,) = await temporal_client.pending_activities(loop.client, handle.id) or []
        return "model call" in one.heartbeat

    await loop.until(works, "the agent's heartbeat tells of its call")
    with pytest.raises(PayloadKeyError):
        await temporal_client.pending_activities(blind, handle.id)
    await loop.release("codec-command")
    assert await solved(loop, handle)
