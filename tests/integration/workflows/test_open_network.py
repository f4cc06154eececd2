"""Boxes get an open network if the run or the task asks for it, by role; the local gateway refuses to give one."""

from typing import Any

import pytest

from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, call, finish

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("of_task", "of_run", "outcome"),
    [
        ([], ["grade"], "grader_failed"),
        (["grade"], [], "grader_failed"),
        (["agent"], ["grade"], "infra_failed"),
        ([], [], "graded"),
    ],
)
async def test_only_the_boxes_that_are_named_ask_for_it(
    loop: Loop, of_task: list[str], of_run: list[str], outcome: str
) -> None:
    if outcome != "infra_failed":
        await loop.script(call("echo two > a.txt"), "Done.")
    settings: dict[str, Any] = {"sandbox": {"network": of_run}}
    _, row = await finish(loop, await loop.start(loop.dataset(**TASK, network=of_task), **settings))
    assert row.outcome == outcome
    assert ("allow_internet_access" in row.outcome_reason) == (outcome != "graded"), row.outcome_reason
