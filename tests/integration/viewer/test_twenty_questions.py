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

from cli.run_screen import lines_of
from ratchet.types import SteeringAction
from stack.parts import Stack
from stack.run_status import diagnose
from store.database import Database
from store.rollout_words import index_rollouts
from store.schema import (
    BatchItemTable,
    BatchTable,
    EngineTable,
    EvaluationTable,
    PolicyVersionTable,
    RolloutTable,
    RunTable,
)
from store.steering import Request, record
from store.token_statistics import record_step_tokens
from tests.integration.ratchet_command import Ratchet
from tests.integration.viewer.filled_store import FilledRun, RunFiller, fill_run, said, tool_call
from viewer.settings import ViewerSettings
from viewer.static_export import PageExporter

RUN = "asked"
Answer = tuple[list[str] | str, list[str]]
"""The links to follow, as patterns, or the command to type; and what is then said. Capitals are ids of `asked`."""
OPERATOR: dict[str, Answer] = {
    "how far is the run, and how long will it still take?": (["asked"], ["step 3 of 6 about 6 min left"]),
    "which rollouts work now?": (["asked", r"stage=no%20model%20call%20yet|stage=agent%20works"], ["agent works"]),
    "how many rollouts got no verdict in the last hours, and why?": (
        ["asked"],
        [
            "without verdict 1 in the last hour",
            "commonest error of the last hour: infra failed: SandboxLostError: the box is gone (1,",
        ],
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
        ["cat calc.py -n 1 50% 0 0% +50%"],
    ),
}
QUESTIONS = OPERATOR | RESEARCHER
STRANGER = {
    "which model, tasks and algorithm?": "model:? tiny datasets .*; loss icepop, advantage mean",
    "does it run?": "asked running|run asked is running",
    "when did it begin, in UTC?": r"began \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    "how far is it, and how long will it take?": "step:? 3 of 6 about 6 min left",
    "how large is a step?": "2 groups × 4 rollouts",
    "what is the training reward, and what was it at first?": r"training reward 0\.50 in step 3 0\.25 in step 1;",
    "how much was solved in training, and in evaluations?": "solved 3 of 7 training 2 of 6, all evaluations 1 of 1",
    "is it better on other tasks?": r"held-out mean reward 1\.00",
    "how old were the weights that sampled?": "staleness 1.5 steps mean of the tokens of step 3",
    "how many tasks gave nothing to learn?": "tasks without signal 2 of 3",
    "what do rollouts do now?": "open rollouts 1 1 agent works",
    "how many rollouts end a minute?": r"pace:? \d+\.\d an hour newest 10 min",
    "how many ended without a verdict?": "without verdict 1 in the last hour",
    "which error is commonest?": "commonest error of the last hour: infra failed: SandboxLostError: the box is gone",
    "which test fails most often?": "commonest failed test: test_add of shop-0 2 of ",
    "what do agents run last when they fail?": "commonest last command: make test 2 of ",
    "does a patch cheat?": "patches 1 rejected, 1 flagged",
    "do the engines have the newest weights?": "engines 1 of 2 answers 1 on newest weights 3.e0, 1 silent",
    "is there an alarm?": "alarms 1 in the newest step no contrast in step 3",
    "from which weights can one go on?": "weights to go on from asked@2 the best in evaluations",
    "has a person changed it?": "changes by people 1 set training.max_staleness",
}
"""Questions of a person who sees the run for the first time: the first screen of its page, of its published page and of
`ratchet status` answer them. The value is a pattern for its words, without brackets and backticks."""


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
        printed = ratchet(*with_ids(how).split(), RATCHET_DATABASE_URL=database.url).output
        assert [words for words in answers if with_ids(words) not in " ".join(printed.split())] == []
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


async def add_what_a_stranger_sees(database: Database, asked: FilledRun, model: Path) -> None:
    """Add versions, engines on different ones, a step with another reward, and failures that are alike."""
    async with database.begin() as connection:
        filler = RunFiller(connection, RUN, model)
        for step in (2, 3):
            version = {"version": f"{RUN}/{step}.e0", "run_id": RUN, "step": step, "epoch": 0, "uri": "/w"}
            await connection.execute(insert(PolicyVersionTable).values(**version, files=[{"name": "w"}]))
        await connection.execute(update(EngineTable).values(version=f"{RUN}/2.e0"))
        engine = {"address": "http://127.0.0.1:2", "state": "ready", "version": f"{RUN}/3.e0", "model_path": "unused"}
        await connection.execute(insert(EngineTable).values(**engine))
        group = await filler.group(20, asked.task, "consumed")
        item = {"run_id": RUN, "group_id": group, "step": 3, "use": "trained", "rewards": [1.0, 0.0]}
        await connection.execute(insert(BatchItemTable).values(**item))
        for member, reward in enumerate((1.0, 0.0)):
            ended = {"outcome": "graded", "agent_exit": "done", "reward": reward}
            rollout = await filler.rollout(group, asked.task, member, **ended)
            await filler.verdict(rollout, reward > 0)
        for one in (rollout, asked.failed):
            ran = said("", tool_call(1, "bash", command="make test"))
            await filler.turn(await filler.session(one), one, 0, [], ran, None, fork_cause="root")


@pytest.mark.parametrize("where", ["page", "published", "status"])
async def test_the_first_screen_answers_a_stranger(
    client: httpx.AsyncClient, asked: FilledRun, database: Database, model: Path, tmp_path: Path, where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await add_what_a_stranger_sees(database, asked, model)
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    if where == "status":
        monkeypatch.setenv("FORCE_COLOR", "1")  # stdout is a terminal
        monkeypatch.setenv("COLUMNS", "120")
        shown = "\n".join(lines_of(await diagnose(Stack(tmp_path), RUN)))
        assert shown.count("\n") < 24
        monkeypatch.delenv("FORCE_COLOR")  # 79 columns hold what matters of each fact; the tests' names may be long
        narrow = lines_of(await diagnose(Stack(tmp_path), RUN))
        assert [one for one in narrow if one.endswith(" …") and not one.startswith("unsolved")] == []
    elif where == "page":
        shown = (await client.get(f"/runs/{RUN}")).text
    else:
        await PageExporter(ViewerSettings(database.url), tmp_path / "out").export_run(RUN, 5)
        shown = (tmp_path / f"out/runs/{RUN}.html").read_text()
    head = shown.partition("<h1>")[2].partition("</ul>")[0] if where != "status" else shown
    text = words_of(head)
    missing = {asks: answer for asks, answer in STRANGER.items() if not re.search(answer, text)}
    assert len(STRANGER) == 21 and missing == {}, text


def words_of(shown: str) -> str:
    """Return the words on a page or screen, without what sets names, values and details apart."""
    text = unescape(re.sub(r"<[^>]+>", " ", shown))
    for name in ("began", "step", "reward", "solved", "signal", "rollouts", "minute", "verdict", "patches", "engines",
                 "staleness", "alarms", "from", "people"):  # fmt: skip
        text = text.replace(f"{name}: ", f"{name} ")
    return " ".join(re.sub(r"[()`▁-█]", " ", text).split())
