"""A run that is started from Python: it is accepted or refused before the call returns."""

from typing import Any

import pytest

from client.session import Client
from ratchet.errors import ConfigError
from tests.integration.workflows.conftest import Loop

pytestmark = pytest.mark.timeout(600)


def config(loop: Loop, **more: Any) -> dict[str, Any]:
    """Return a config of a run that ends at once."""
    return {
        "model": str(loop.model),
        "datasets": [{"path": loop.dataset(eval_cmd="false")}],
        "grading": {"admission": "ignored"},
        "training": {"steps": 0},
        "evaluation": {"at": []},
        **more,
    }


async def test_a_refused_run_raises_and_an_accepted_one_is_there(loop: Loop) -> None:
    client = Client(loop.home)
    with pytest.raises(ConfigError, match=r"run again-.* is refused: init_from: 'nobody@3' names no published step"):
        client.train(config(loop, init_from="nobody@3"), "again")
    run = client.train(config(loop), "again")
    assert run.run_id.startswith("again-") and run.row().config["training"]["steps"] == 0
    await loop.result(loop.client.get_workflow_handle(f"run/{run.run_id}"))
    assert run.row().state == "done"
