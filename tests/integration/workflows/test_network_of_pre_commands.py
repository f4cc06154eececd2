"""With `pre_commands` in `sandbox.network`, both boxes have a network until these have ended, and none after them."""

from typing import Any

import pytest

from tests.integration.workflows.conftest import Loop, collector, home, loop, model  # noqa: F401
from tests.integration.workflows.test_rollout import TASK, call, finish

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def own_environment() -> dict[str, str]:
    return {"RATCHET_SANDBOX_PROVIDER": "tests.standins.switched_network:make_provider"}


@pytest.mark.parametrize(
    ("of_task", "of_run", "agents", "graders"),
    [
        (["pre_commands"], [], ["OpenedFirst(then=True)", "True"], ["OpenedFirst(then=False)", "False"]),
        ([], ["pre_commands"], ["OpenedFirst(then=True)", "True"], ["OpenedFirst(then=False)", "False"]),
        (["pre_commands"], ["grade"], ["OpenedFirst(then=True)", "True"], ["open"]),
        (["agent", "pre_commands"], [], ["open"], ["OpenedFirst(then=False)", "False"]),
        ([], [], ["True"], ["False"]),
    ],
)
async def test_the_network_is_closed_before_an_agent_or_a_test_runs(
    loop: Loop,  # noqa: F811
    of_task: list[str],
    of_run: list[str],
    agents: list[str],
    graders: list[str],
) -> None:
    await loop.script(call("echo two > a.txt; cat /run/network > seen.txt"), "Done.")
    look = f"test \"$(cat seen.txt | tr '\\n' ' ')\" = '{' '.join(agents)} '"
    look += f" && test \"$(cat /run/network | tr '\\n' ' ')\" = '{' '.join(graders)} '"
    pre = [*TASK["pre_commands"], "test $(wc -l < /run/network) = 1"]
    settings: dict[str, Any] = {"sandbox": {"network": of_run}}
    task = {"pre_commands": pre, "eval_cmd": look}
    _, row = await finish(loop, await loop.start(loop.dataset(**task, network=of_task), **settings))
    assert row.outcome == "graded", row.outcome_reason
    assert row.reward == 1.0
