"""A run and a rollout in the Temporal UI: search attributes, memo, details, summaries and queries."""

import json
from typing import Any

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowHandle
from temporalio.contrib.pydantic import pydantic_data_converter

from ratchet.types import SEARCH_ATTRIBUTES
from stack.run_status import describe_work, diagnose
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_groups import Training, training
from tests.integration.workflows.test_rollout import PRE, call

pytestmark = pytest.mark.timeout(600)
__all__ = ["training"]


async def heartbeat(handle: WorkflowHandle[Any, Any], activity: str) -> str:
    """Return what the heartbeats of a pending activity show, empty if there is none."""
    for pending in (await handle.describe()).raw_description.pending_activities:
        if pending.activity_type.name == activity and pending.heartbeat_details.payloads:
            payload = pending.heartbeat_details.payloads[0]
            return str(pydantic_data_converter.payload_converter.from_payload(payload))
    return ""


async def details(handle: WorkflowHandle[Any, Any]) -> str:
    return (await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)).current_details


async def summaries(handle: WorkflowHandle[Any, Any]) -> dict[str, str]:
    """Return the summary of each activity of a workflow, by its type; local ones are markers in the history."""
    found = {}
    for event in (await handle.fetch_history()).events:
        if event.HasField("activity_task_scheduled_event_attributes"):
            name = event.activity_task_scheduled_event_attributes.activity_type.name
        elif event.marker_recorded_event_attributes.marker_name == "core_local_activity":
            name = json.loads(event.marker_recorded_event_attributes.details["data"].payloads[0].data)["activity_type"]
        else:
            continue
        payload = event.user_metadata.summary
        found[name] = str(pydantic_data_converter.payload_converter.from_payload(payload)) if payload.data else ""
    return found


async def test_a_run_is_found_and_says_what_it_waits_for(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")
    query = f'ratchet_run = "{training.run_id}" AND WorkflowType = "TrainRun" AND ratchet_step = 0'
    assert "ratchet_run" in SEARCH_ATTRIBUTES

    async def listed() -> list[str]:
        return [one.id async for one in loop.client.list_workflows(query)]

    assert await loop.until(listed, "the run is found by its attributes") == [f"run/{training.run_id}"]
    handle = loop.client.get_workflow_handle(f"run/{training.run_id}")
    memo = await (await handle.describe()).memo()
    assert (memo["state"], memo["step"], memo["steps"]) == ("running", 0, 1)

    async def agents_work() -> Any:
        status = await handle.query("state")
        return status if "2 rollouts: agent works" in status["situation"] else None

    status = await loop.until(agents_work, "the run shows what its rollouts do")
    assert f"]({loop.environment['RATCHET_VIEWER_URL']}/runs/{training.run_id})" in await details(handle)
    assert status["waits_for"] == "groups, boxes or verdicts" and status["waits_since"].endswith("UTC")
    assert (status["state"], status["num_open_groups"]) == ("running", 1)
    await handle.execute_update("pause", {"by": "anna", "reason": "to look"})

    async def shows_pause() -> bool:
        shown = await handle.query("state")
        return bool(shown["state"] == "paused" and shown["waits_for"] == "a person")

    await loop.until(shows_pause, "the run says that it waits for a person")
    memo = await (await handle.describe()).memo()
    assert (memo["state"], memo["reason"]) == ("paused", "paused by anna: to look")
    await handle.execute_update("resume", {})


async def test_a_rollout_shows_its_stage_and_what_it_has_given(training: Training, loop: Loop) -> None:
    await loop.until(training.working, "both agents work")
    row = (await training.rows())[0]
    handle = loop.client.get_workflow_handle(row.workflow_id)

    async def agent_works() -> Any:
        status = await handle.query("state")
        return status if status["stage"] == "agent" else None

    working = await loop.until(agent_works, "the rollout shows its agent")
    assert f"]({loop.environment['RATCHET_VIEWER_URL']}/rollouts/{row.id})" in await details(handle)
    assert working["box"] and working["stage_since"].endswith("UTC") and not working["verdict"]
    await training.let_go()
    await loop.result(handle)
    status = await handle.query("state")
    assert status["stage"] == "ended as graded"
    assert status["agent"].startswith("done, 1 model calls") and status["patch"] == "0 bytes"
    assert status["verdict"].startswith("not solved")
    shown = await summaries(handle)
    assert working["box"] in shown["agent"] and working["box"] in shown["workspace"]
    assert shown["diff"] == f"agent: {status['agent']}" and shown["finalise"] == status["verdict"]
    assert shown["grade"].startswith("patch of 0 bytes, box ")


async def test_a_rollout_by_hand_names_the_command_that_it_waits_for(loop: Loop) -> None:
    """Its set-up and its tests wait for a file in their box; the tests then end without success."""
    wait = "while [ ! -e /tmp/go ]; do sleep 0.1; done"
    tests = f"{wait}; echo not ok 1; echo 'cannot load the fixtures' >&2; exit 70"
    dataset = loop.dataset(pre_commands=[PRE, f"echo fetching >&2; {wait}"], eval_cmd=tests)
    await loop.script(call("echo two > a.txt"), "Done.")
    handle = await loop.start(dataset)

    async def told(activity: str, what: str) -> str:
        found = await heartbeat(handle, activity)
        return found if what in found else ""

    async def go_on() -> None:
        box = await loop.provider().connect((await handle.query("state"))["box"])
        await box.write_file("/tmp/go", "")
        await box.close()

    shown = await loop.until(lambda: told("workspace", "pre_command 2 of 2"), "the pre_command is named")
    assert "it printed last: fetching" in shown and "this try ends at" in shown
    (work,) = await describe_work(loop.stack, handle.id)
    assert work.startswith("workspace, try 1: pre_command 2 of 2 has run for")
    by_hand = (await loop.rollout(handle)).run_id
    assert any("workspace: pre_command 2 of 2" in one for one in (await diagnose(loop.stack, by_hand)).working)
    found = [one.id async for one in loop.client.list_workflows('ratchet_task = "task" AND WorkflowType = "Rollout"')]
    assert handle.id in found
    await go_on()
    shown = await loop.until(lambda: told("grade", "runs the tests"), "the tests are named")
    assert f"`{wait}; echo" in shown
    first = (await handle.query("state"))["box"]
    await go_on()

    async def second_box_works() -> bool:
        """No test is named that failed, so a second box decides."""
        is_another = (await handle.query("state"))["box"] != first
        return is_another and bool(await told("grade", "runs the tests"))

    await loop.until(second_box_works, "the tests run again")
    await go_on()
    await loop.result(handle)
    assert (await handle.query("state"))["verdict"] == "not solved: exit code 70: cannot load the fixtures"
