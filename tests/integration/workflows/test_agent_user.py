"""The agent's program runs as a user of the image, which run or task name, and owns what it changes."""

import pytest

from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import PRE, call, finish

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("by_task", [False, True])
async def test_the_agent_works_as_the_user_that_is_named(loop: Loop, by_task: bool) -> None:
    of_task = {"agent_user": "nobody"} if by_task else {}
    dataset = loop.dataset(pre_commands=[PRE], eval_cmd='test "$(cat a.txt)" = "nobody nobody"', **of_task)
    await loop.script(
        call('echo "$(id -un) $(stat -c %U a.txt .git)" | tr "\\n" " " | cut -d" " -f1,2 > a.txt'), "Done."
    )
    harness = {"user": "daemon" if by_task else "nobody"}
    _, row = await finish(loop, await loop.start(dataset, harness=harness))
    assert (row.outcome, row.reward) == ("graded", 1.0), row.outcome_reason
