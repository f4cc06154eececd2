"""An agent that made no model call is no evidence about the policy; one whose first call was begun is."""

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowHandle

from store.schema import AttemptTable
from tests.integration.workflows.conftest import Loop
from tests.integration.workflows.test_rollout import TASK, finish, of_attempts

pytestmark = pytest.mark.timeout(600)

# One call of the session, whose status the agent prints, and with which it ends.
ASK = """/opt/ratchet/bin/python3 -c '
import json, os, sys, urllib.error, urllib.request
address = os.environ["ADAPTER_URL"] + "/v1/chat/completions"
headers = {"authorization": "Bearer " + os.environ["RATCHET_SESSION_TOKEN"], "content-type": "application/json"}
body = {"model": "policy", "messages": [{"role": "user", "content": "word " * int(sys.argv[1])}]}
try:
    urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers))
except urllib.error.HTTPError as error:
    sys.exit("refused with %d" % error.code)
' NUM_WORDS"""


async def start(loop: Loop, command: str, **limits: float) -> WorkflowHandle[Any, Any]:
    harness = {"name": "tests.standins.shell_agent:ShellAgent", "options": {"command": command}}
    limits = {"agent_seconds": 60, "eval_seconds": 20, **limits}
    return await loop.start(loop.dataset(**TASK), harness=harness, limits=limits)


async def test_without_a_call_no_end_is_graded_and_the_boxes_are_bounded(loop: Loop) -> None:
    """Attempt 1 ends well, attempt 2 crashes, attempt 3 is ended at its deadline.

    Each has made the right edit, but nothing of it is the policy's.
    """
    edit = "echo two > /workspace/repo/a.txt"
    command = f"{edit}; case $PWD in */1) exit 0 ;; */2) echo no such option >&2; exit 7 ;; esac; sleep 600"
    handle = await start(loop, command, agent_seconds=2)
    _, row = await finish(loop, handle)
    assert (row.outcome, row.reward) == ("infra_failed", None), row.outcome_reason
    assert (await handle.query("state"))["attempt"] == 3, "attempts that were begun"
    assert await of_attempts(loop, row.id, AttemptTable.agent_exit) == ["starved"] * 3
    ended = "the agent made no model call; it ended as time_budget"
    assert row.outcome_reason.startswith(ended)


async def test_a_first_call_that_was_begun_is_evidence_and_one_that_was_refused_is_none(loop: Loop) -> None:
    """Their program is unknown to us: only the store tells that the one call was in flight, or was refused.

    A prompt that does not fit before the policy has answered is the work of no policy, so no box more is tried.
    """
    await loop.script("never delivered", hold="first")
    in_flight = await start(loop, ASK.replace("NUM_WORDS", "1"), agent_seconds=4)
    refused = await start(loop, "cd /workspace/repo && echo two > a.txt; " + ASK.replace("NUM_WORDS", "300000"))
    (_, first), (_, second) = await asyncio.gather(finish(loop, in_flight), finish(loop, refused))
    await loop.release("first")
    assert (first.outcome, first.reward, first.agent_exit) == ("graded", 0.0, "time_budget"), first.outcome_reason
    assert (second.outcome, second.reward, second.agent_exit, second.num_turns) == ("infra_failed", None, "starved", 0)
    assert "first model call was refused: " in second.outcome_reason
    assert len(await of_attempts(loop, second.id, AttemptTable.agent_exit)) == 1
