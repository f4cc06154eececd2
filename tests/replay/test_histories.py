"""Recorded histories replay under the present workflow code, so that running workflows survive its deployment."""

import base64
import gzip
import json
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from stack.worker import WORKFLOWS

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json.gz"))


def _load(path: Path) -> WorkflowHistory:
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    return WorkflowHistory.from_json(recorded["workflow_id"], recorded["history"])


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name)
async def test_history_replays(path: Path) -> None:
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(_load(path))


def _kind(event: dict[str, Any]) -> str:
    """Return what a command event has asked for."""
    if "activityTaskScheduledEventAttributes" in event:
        return str(event["activityTaskScheduledEventAttributes"]["activityType"]["name"])
    names = {
        "startChildWorkflowExecutionInitiatedEventAttributes": "child",
        "timerStartedEventAttributes": "timer",
    }
    return next((name for key, name in names.items() if key in event), "")


def _answers(workflow_task: str, event: dict[str, Any]) -> bool:
    """Return whether the event is a command of this workflow task."""
    attributes = next((value for key, value in event.items() if key.endswith("EventAttributes")), {})
    return bool(attributes.get("workflowTaskCompletedEventId") == workflow_task)


def _as_if_the_view_were(name: str, after: str, command: str, changes: dict[str, Any]) -> WorkflowHistory:
    """Return a history of TrainRun up to the commands that answer a look at the run's row, with other values in it.

    The look is the first one that follows the activity `after` and is answered by `command`.
    """
    recorded = json.loads(gzip.decompress((Path(__file__).parent / "histories" / name).read_bytes()))
    events = recorded["history"]["events"]
    scheduled = [event for event in events if "activityTaskScheduledEventAttributes" in event]
    looks = {
        look["eventId"] for before, look in pairwise(scheduled) if (_kind(before), _kind(look)) == (after, "view_run")
    }
    for number, event in enumerate(events):
        completed = event.get("activityTaskCompletedEventAttributes")
        if completed is None or completed["scheduledEventId"] not in looks:
            continue
        rest = iter(events[number:])
        answer = next(one for one in rest if "workflowTaskCompletedEventAttributes" in one)
        commands = list(takewhile(partial(_answers, answer["eventId"]), rest))
        if command in map(_kind, commands):
            payload = completed["result"]["payloads"][0]
            view = json.loads(base64.b64decode(payload["data"])) | changes
            payload["data"] = base64.b64encode(json.dumps(view).encode()).decode()
            end = events.index(commands[-1]) + 1
            return WorkflowHistory.from_json(recorded["workflow_id"], {"events": events[:end]})
    raise AssertionError(f"{name} has no look after {after} that {command} answers")


@pytest.mark.parametrize(
    ("name", "after", "command", "changes"),
    [
        ("train_run.cancelled.json.gz", "prepare_run", "learn.engines", {"wish": "stop"}),
        (
            "train_run.steered.json.gz",
            "steer_run",
            "learn.engines",
            {"wish": "stop", "state": "paused", "last_step": None},
        ),
        ("train_run.json.gz", "view_run", "timer", {"wish": "pause", "plannable": True}),
    ],
    ids=["begin", "paused", "held"],
)
async def test_a_wish_that_an_earlier_version_read_is_obeyed_as_by_it(
    name: str, after: str, command: str, changes: dict[str, Any]
) -> None:
    """Commit 8f6066b read wishes that only SQL wrote: a stop updated the engines first, a pause planned nothing."""
    history = _as_if_the_view_were(name, after, command, changes)
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)


@pytest.mark.parametrize("name", ["rollout.boxes_lost.json.gz", "rollout.grading_retried.json.gz"])
async def test_a_spent_guard_is_followed_by_another_box_as_in_an_earlier_version(name: str) -> None:
    """Commit b528aed knew no GuardSpentError: it took any failure of a stage for that of a box."""
    recorded = json.loads(gzip.decompress((Path(__file__).parent / "histories" / name).read_bytes()))
    failures = [
        event["activityTaskFailedEventAttributes"]["failure"]["applicationFailureInfo"]
        for event in recorded["history"]["events"]
        if "activityTaskFailedEventAttributes" in event
    ]
    assert failures
    for failure in failures:
        failure["type"] = "GuardSpentError"
    history = WorkflowHistory.from_json(recorded["workflow_id"], recorded["history"])
    await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)


def test_every_workflow_has_a_history() -> None:
    assert {path.name.partition(".")[0].replace("_", "") for path in HISTORIES} == {
        workflow.__name__.lower() for workflow in WORKFLOWS
    }


async def test_another_order_of_stages_is_noticed() -> None:
    """The check can fail: a rollout's history without its boot does not replay."""
    recorded = json.loads(gzip.decompress((Path(__file__).parent / "histories" / "rollout.json.gz").read_bytes()))
    for event in recorded["history"]["events"]:
        scheduled = event.get("activityTaskScheduledEventAttributes")
        if scheduled and scheduled["activityType"]["name"] == "boot":
            scheduled["activityType"]["name"] = "grade"
    history = WorkflowHistory.from_json(recorded["workflow_id"], recorded["history"])
    with pytest.raises(Exception, match=r"[Nn]ondeterminism"):
        await Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter).replay_workflow(history)
