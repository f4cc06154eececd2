"""Ten questions of an operator and ten of a researcher about a run: at most three links from the list of runs, or one
command, answer each."""

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import SteeringAction
from store.database import Database
from store.rollout_words import index_rollouts
from store.schema import BatchTable, EngineTable, EvaluationTable, RolloutTable, RunTable
from store.steering import Request, record
from store.token_statistics import record_step_tokens
from tests.integration.ratchet_command import Ratchet
from tests.integration.viewer.filled_store import FilledRun, RunFiller, fill_run

RUN = "asked"
Answer = tuple[list[str] | str, list[str]]
"""The links to follow, as patterns, or the command to type; and what is then said. Capitals are ids of `asked`."""
OPERATOR: dict[str, Answer] = {
    "how far is the run, and how long will it still take?": (["asked"], ["step 3 of 6 about 6 min left"]),
    "which rollouts work now?": (["asked", r"stage=no%20model%20call%20yet|stage=agent%20works"], ["agent works"]),
    "how many rollouts got no verdict in the last hours, and why?": (
        ["asked"],
        ["without verdict 1 in the last hour", "1: SandboxLostError: the box is gone"],
    ),
    "why has this rollout no reward?": (["asked", r"/rollouts/FAILED$"], ["SandboxLostError", "this is not a zero"]),
    "which rollout took longest, and on what?": (
        ["asked", r"sort=longest"],
        ["so far", "waits between stages", "among the newest 1,000 rollouts"],
    ),
    "which box does a rollout that runs hold, and how do I get into it?": (
        ["asked", r"/rollouts/RUNNING$"],
        ["box-RUNNING", "ratchet admin sandboxes shell"],
    ),
    "what did the agent's program print?": (["asked", r"/rollouts/SOLVED$", r"/attempts/1$"], ["cloned", "hello"]),
    "which weights do the engines have, and does one of them not answer?": (
        ["asked"],
        ["ready, weights asked/3.e0", "silent for 5 min"],
    ),
    "who changed the run, what, and why?": (
        ["asked", r"/steering$"],
        ["anna", "training.max_staleness", "the groups come too late"],
    ),
    "what does a million trained tokens cost, and what would lower it?": (
        ["asked", r"/costs$"],
        ["box-hours", "What changes it:"],
    ),
}
RESEARCHER: dict[str, Answer] = {
    "is the policy better on tasks that it was not trained on, and at which step most?": (
        ["asked"],
        ["held-out mean reward 1.00", "1 tasks, T=0; best at step 2"],
    ),
    "on which rollouts does the rate of the evaluation before training rest?": (
        ["asked", r"evaluation=start-greedy"],
        ["graded", "1", "shop-0"],
    ),
    "which token had the largest ratio in step 1, and which command did it write?": (
        ["asked", r"/steps/1$", r"/steps/1\?tokens=true"],
        ["cat calc.py"],
    ),
    "how much of the loss of step 1 came from which rollout?": (
        ["asked", r"/steps/1$"],
        ["SOLVED 50%", "UNSOLVED 50%"],
    ),
    "which tasks never gave signal, and why?": (
        ["asked", r"/tasks$"],
        ["shop-1", "all 2 rewards so far are 0; 1 of them rejected by a rule", "shop-2", "no rollout has a verdict"],
    ),
    "which patches look suspicious, and at which place?": (
        ["asked", r"flagged=true", r"/rollouts/SOLVED$"],
        ["skips a test (calc.py:3)"],
    ),
    "by which rule was a patch rejected, and which file did it touch?": (
        "explain REJECTED",
        ["runner_tampered", "conftest.py"],
    ),
    "which test did the unsolved rollout of step 1 fail?": (
        ["asked", r"/steps/1$", r"/rollouts/UNSOLVED$"],
        ["test_add failed"],
    ),
    "where did the two rollouts of a trained group part?": (["asked", r"/steps/1$", r"/groups/TRAINED$"], ["-n"]),
    "which command is in most rollouts that did not solve their task?": (
        ["asked", r"/commands$", r"by_line=true"],
        ["cat calc.py -n 1 50%"],
    ),
}
QUESTIONS = OPERATOR | RESEARCHER


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
        await add_facts_of_people_and_parts(connection, filled)
    await index_rollouts(database, 60)
    return filled


async def add_facts_of_people_and_parts(connection: AsyncConnection, filled: FilledRun) -> None:
    """Add trained steps, the ends of a rollout and of the evaluation, an engine that is silent, and a request."""
    now = datetime.now(UTC)
    await connection.execute(update(BatchTable).values(stepped_at=now - timedelta(minutes=6)))
    for step, minutes in ((2, 4), (3, 2)):
        trained = {"planned_at": now - timedelta(minutes=minutes + 1), "stepped_at": now - timedelta(minutes=minutes)}
        plan = {"state": "stepped", "members": [], "denominators": [], "knobs": {}, "seed": 0}
        await connection.execute(insert(BatchTable).values(run_id=RUN, step=step, **plan, **trained))
    for table, key, value, ended_at in (
        (RolloutTable, RolloutTable.id, filled.failed, now - timedelta(minutes=20)),
        (EvaluationTable, EvaluationTable.run_id, RUN, now),
    ):
        await connection.execute(update(table).where(key == value).values(ended_at=ended_at))
    await connection.execute(update(RunTable).where(RunTable.run_id == RUN).values(best_step=2, best_rate=1.0))
    engine = {"address": "http://127.0.0.1:1", "state": "ready", "version": f"{RUN}/3.e0", "model_path": "unused"}
    await connection.execute(insert(EngineTable).values(**engine, heartbeat_at=now - timedelta(minutes=5)))
    request = Request(RUN, "request", "anna", "the groups come too late")
    await record(connection, request, SteeringAction.SET, "training.max_staleness", 1, 2, 4)


def test_there_are_ten_questions_of_each() -> None:
    assert (len(OPERATOR), len(RESEARCHER), len(QUESTIONS)) == (10, 10, 20)


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_question_is_answered_by_three_clicks_or_a_command(
    client: httpx.AsyncClient, asked: FilledRun, question: str, database: Database, ratchet: Ratchet
) -> None:
    names = {  # longer names first, because one is a part of another
        "FAILED": asked.failed, "UNSOLVED": asked.unsolved, "SOLVED": asked.solved, "REJECTED": asked.rejected,
        "TRAINED": asked.trained_group, "RUNNING": asked.running,
    }  # fmt: skip
    how, answers = QUESTIONS[question]

    def with_ids(text: str) -> str:
        return re.sub("|".join(names), lambda match: str(names[match[0]]), text)

    if isinstance(how, str):
        said = ratchet(*with_ids(how).split(), RATCHET_DATABASE_URL=database.url).output
        assert [words for words in answers if with_ids(words) not in " ".join(said.split())] == []
        return
    assert len(how) <= 3
    html = (await client.get("/runs")).text
    for click in how:
        pattern = with_ids(click)
        targets = [unescape(one) for one in re.findall(r'<a href="(/[^"]*)"', html)]
        target = next((one for one in targets if re.search(pattern, one)), None)
        assert target is not None, f"no link like {pattern} among {targets}"
        answer = await client.get(target, follow_redirects=True)
        assert answer.status_code == 200
        html = answer.text
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())
    assert [words for words in answers if with_ids(words) not in shown] == [], shown
