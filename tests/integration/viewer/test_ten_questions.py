"""Questions about a run, each answered by following at most three links from the list of runs."""

import re
from html import unescape
from pathlib import Path

import httpx
import pytest

from store.database import Database
from store.rollout_words import index_rollouts
from store.token_statistics import record_step_tokens
from tests.integration.viewer.filled_store import FilledRun, RunFiller, fill_run

RUN = "asked"
QUESTIONS = {
    "which token had the largest ratio in step 1, and which command did it write?": (
        ["asked", r"/steps/1$", r"/turns/\d+$"],
        ["cat calc.py"],
    ),
    "which tasks never gave signal, and why?": (
        ["asked", r"/tasks$"],
        ["shop-1", "all 2 rewards so far are 0; 1 of them rejected by a rule", "shop-2", "no rollout has a verdict"],
    ),
    "why has a rollout no reward?": (["asked", r"/rollouts/FAILED$"], ["SandboxLostError", "this is not a zero"]),
    "which patches look suspicious, and at which place?": (["asked"], ["skips a test at calc.py:3"]),
    "what does the page of a suspicious patch say?": (
        ["asked", r"flagged=true", r"/rollouts/SOLVED$"],
        ["skips a test (calc.py:3)"],
    ),
    "which test did the unsolved rollout of step 1 fail?": (
        ["asked", r"/steps/1$", r"/rollouts/UNSOLVED$"],
        ["test_add", "failed"],
    ),
    "where did the two rollouts of a trained group part?": (
        ["asked", r"/steps/1$", r"/groups/TRAINED$"],
        ["-n"],
    ),
    "on which rollouts does the rate of the evaluation before training rest?": (
        ["asked", r"evaluation=start-greedy"],
        ["graded", "1", "shop-0"],
    ),
    "what does a million trained tokens cost, and what would lower it?": (
        ["asked", r"/costs$"],
        ["box-hours", "What changes it:"],
    ),
    "by which rule was a patch rejected, and which file did it touch?": (
        ["asked", r"outcome=rejected", r"/rollouts/REJECTED$"],
        ["runner_tampered", "conftest.py"],
    ),
    "which rollout took longest, and on what?": (
        ["asked", r"sort=longest"],
        ["so far", "waits between stages", "among the newest 1,000 rollouts"],
    ),
    "which command is in most rollouts that did not solve their task?": (
        ["asked", r"/commands$", r"by_line=true"],
        ["cat calc.py -n 1 50%"],
    ),
    "which rollouts work now?": (["asked", r"stage=no%20model%20call%20yet|stage=agent%20works"], ["agent works"]),
}


@pytest.fixture
async def asked(database: Database, model: Path) -> FilledRun:
    """A filled run with two more tasks, one of them without any verdict, and the largest ratio of its step."""
    filled = await fill_run(database, RUN, model)
    async with database.begin() as connection:
        filler = RunFiller(connection, RUN, model)
        second, third = await filler.task(1), await filler.task(2)
        await connection.exec_driver_sql(
            f"UPDATE rollout_group SET task_id = {second} WHERE id = {filled.silent_group}"
        )
        await connection.exec_driver_sql(
            f"UPDATE rollout SET task_id = {second} WHERE group_id = {filled.silent_group}"
        )
        await connection.exec_driver_sql(
            f"UPDATE rollout_group SET task_id = {third} WHERE id = (SELECT group_id FROM rollout WHERE id ="
            f" {filled.failed})"
        )
        await connection.exec_driver_sql(f"UPDATE rollout SET task_id = {third} WHERE id = {filled.failed}")
        turn = await connection.exec_driver_sql(f"SELECT min(id) FROM turn WHERE rollout_id = {filled.solved}")
        token = {
            "rollout_id": filled.solved, "turn_id": turn.scalar_one(), "position": 5, "token_id": 7,
            "behaviour": -3.0, "logprob": -1.0, "entropy": 0.5, "masked": True,
        }  # fmt: skip
        await record_step_tokens(connection, RUN, 1, [token])
    await index_rollouts(database, 60)
    return filled


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_question_is_answered_by_three_clicks(
    client: httpx.AsyncClient, asked: FilledRun, question: str
) -> None:
    names = {
        "FAILED": asked.failed, "SOLVED": asked.solved, "UNSOLVED": asked.unsolved, "REJECTED": asked.rejected,
        "TRAINED": asked.trained_group, "FLAGGED": asked.solved,
    }  # fmt: skip
    clicks, answers = QUESTIONS[question]
    assert len(clicks) <= 3
    html = (await client.get("/runs")).text
    for click in clicks:
        pattern = re.sub("[A-Z]{3,}", lambda match: str(names[match[0]]), click)
        targets = [unescape(one) for one in re.findall(r'<a href="(/[^"]*)"', html)]
        target = next((one for one in targets if re.search(pattern, one)), None)
        assert target is not None, f"no link like {pattern} among {targets}"
        answer = await client.get(target, follow_redirects=True)
        assert answer.status_code == 200
        html = answer.text
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())
    for words in answers:
        wanted = str(names.get(words, words))
        assert wanted in shown, f"{wanted!r} is not on the page"
