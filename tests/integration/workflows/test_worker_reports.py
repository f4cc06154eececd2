"""Reports of a worker: its version to Temporal, and its work to Prometheus."""

from uuid import uuid4

import httpx
import pytest

from stack.build_id import build_id
from tests.integration.workflows.conftest import Loop

pytestmark = pytest.mark.timeout(600)


async def test_version_and_failed_workflow_tasks_are_seen(loop: Loop) -> None:
    sweep = await loop.client.start_workflow("Sweep", {}, id=f"sweep/{uuid4().hex[:8]}", task_queue="control")
    await sweep.result()
    completed = [
        event.workflow_task_completed_event_attributes
        async for event in sweep.fetch_history_events()
        if event.HasField("workflow_task_completed_event_attributes")
    ]
    assert {one.worker_version.build_id or one.deployment_version.build_id for one in completed} == {build_id()}
    address = f"http://{loop.environment['RATCHET_WORKER_METRICS']}/metrics"
    failing = await loop.client.start_workflow("NoSuchType", id=f"none/{uuid4().hex[:8]}", task_queue="control")

    async def is_counted() -> bool:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            text = (await http.get(address)).text
        return "temporal_workflow_task_execution_failed{" in text and 'workflow_type="NoSuchType"' in text

    try:
        await loop.until(is_counted, "the failure is counted")
    finally:
        await failing.terminate()
