"""Recorded histories replay under the present workflow code, so that running workflows survive its deployment."""

import gzip
import json
from pathlib import Path

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
