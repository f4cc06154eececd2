"""The facts at the head of a run's page: each is what the store says, and links to what it counts."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, insert, update

from cli.run_screen import lines_of
from ratchet.types import SteeringAction
from reads.explanations import explain_thing
from reads.runs import require_run
from reads.vitals import Vital, read_vitals
from stack.parts import Stack
from stack.run_status import diagnose
from store.database import Database
from store.schema import EngineTable, EvaluationTable, PolicyVersionTable, RolloutTable, RunTable
from store.steering import Request, record
from tests.integration.training.records import make_config, make_run
from tests.integration.viewer.filled_store import FilledRun, RunFiller, said, tool_call


async def vitals(database: Database, filled: FilledRun) -> dict[str, Vital]:
    async with database.begin() as connection:
        found = await read_vitals(connection, await require_run(connection, filled.run_id))
    return {one.name: one for one in found.facts}


async def test_the_facts_are_those_of_the_store(filled: FilledRun, database: Database) -> None:
    now = datetime.now(UTC)
    async with database.begin() as connection:
        for rollout_id, minutes in ((filled.solved, 1), (filled.unsolved, 30), (filled.failed, 70)):
            ended = update(RolloutTable).where(RolloutTable.id == rollout_id)
            await connection.execute(ended.values(ended_at=now - timedelta(minutes=minutes)))
        evaluation = update(EvaluationTable).where(EvaluationTable.run_id == filled.run_id)
        await connection.execute(evaluation.values(ended_at=now))
    found = await vitals(database, filled)
    assert found["step"].value == "3 of 6"
    assert found["pace"].value == "6.0 an hour"
    error = f"infra failed: SandboxLostError: the box is gone (1, newest rollout {filled.failed})"
    assert (found["without verdict"].value, found["without verdict"].detail) == (
        "0 in the last hour",
        f"1 in the hour before, 1 in all; commonest error: {error}",
    )
    assert found["open rollouts"].detail.startswith("1 agent works, for up to ")
    assert found["step"].detail.endswith("2 groups × 4 rollouts each, saved at step 0")
    assert found["training reward"].value == "0.25 in step 1" and found["staleness"].value == "1.5 steps"
    assert found["training reward"].detail == "its first value; 1 of 4 solved over the run"
    solved = found["solved"]
    assert (solved.value, solved.detail) == ("2 of 5", "training 1 of 4, evaluation 1 of 1; reward of at least 1")
    assert (found["unsolved"].value, found["patches"].value) == ("3", "1 rejected, 1 flagged")
    alarms = found["alarms"]
    assert (alarms.value, alarms.detail) == ("1 in the newest step", "no contrast in step 3, 2, 1; entropy 2.1 nats")
    assert found["held-out mean reward"].detail.startswith("at step 0, 1 tasks")


async def test_the_weights_to_go_on_from_have_the_name_that_commands_take(
    filled: FilledRun, database: Database
) -> None:
    assert (await vitals(database, filled))["weights to go on from"].value == "none yet"
    run = filled.run_id
    async with database.begin() as connection:
        for step, state in ((1, "retired"), (2, "published"), (3, "published")):
            version = {
                "version": f"{run}/{step}.e0",
                "run_id": run,
                "step": step,
                "epoch": 0,
                "uri": "/w",
                "state": state,
            }
            await connection.execute(insert(PolicyVersionTable).values(**version, files=[{"name": "w"}]))
    found = (await vitals(database, filled))["weights to go on from"]
    assert found.value == f"{run}@3" and "newest" in found.detail
    of_run = update(RunTable).where(RunTable.run_id == run)
    for best, value in ((2, f"{run}@2"), (1, f"{run}@3")):  # the weights of step 1 are deleted
        async with database.begin() as connection:
            await connection.execute(of_run.values(best_step=best))
        found = (await vitals(database, filled))["weights to go on from"]
        assert found.value == value
    assert "best step 1 are deleted" in found.detail


async def test_tasks_of_which_nothing_was_trained_are_counted(filled: FilledRun, database: Database) -> None:
    found = (await vitals(database, filled))["tasks without signal"]
    assert (found.value, found.page) == ("0 of 1", f"/runs/{filled.run_id}/tasks#silent")
    assert "1 open, 1 trained, 1 no signal, 1 failed" in found.detail
    async with database.begin() as connection:
        await connection.exec_driver_sql("UPDATE batch_item SET use = 'no_signal'")
    found = (await vitals(database, filled))["tasks without signal"]
    assert found.value == "1 of 1" and "2 no signal" in found.detail


async def test_failures_name_the_last_command_and_are_alike_but_for_numbers(
    filled: FilledRun, database: Database, model: Path
) -> None:
    now = datetime.now(UTC)
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        looks = said("", tool_call(1, "bash", command="cat calc.py"))
        await filler.turn(await filler.session(filled.failed), filled.failed, 0, [], looks, None, fork_cause="root")
        for rollout_id, reason in ((filled.failed, "the box 12 is gone"), (filled.rejected, "the box 7 is gone")):
            lost = {"outcome": "infra_failed", "outcome_reason": reason, "reward": None}
            of_one = update(RolloutTable).where(RolloutTable.id == rollout_id)
            await connection.execute(of_one.values(**lost, ended_at=now - timedelta(minutes=1)))
    found = (await vitals(database, filled))["without verdict"]
    assert found.value == "2 in the last hour"
    assert "commonest error: infra failed: the box # is gone (2, " in found.detail
    assert f"newest rollout {filled.failed}, last command `cat calc.py`)" in found.detail


async def test_a_busy_run_forgets_no_failure_of_the_hour_before(filled: FilledRun, database: Database) -> None:
    """More rollouts have ended since than are looked at for the pace."""
    async with database.begin() as connection:
        before = update(RolloutTable).where(RolloutTable.id == filled.failed)
        await connection.execute(before.values(ended_at=datetime.now(UTC) - timedelta(minutes=70)))
        await connection.exec_driver_sql(
            "INSERT INTO rollout (run_id, task_id, member, purpose, workflow_id, harness, temperature, outcome, reward,"
            f" ended_at) SELECT '{filled.run_id}', {filled.task}, 0, 'train', 'many/' || n, 'h', 1, 'graded', 1,"
            " now() - n * interval '0.3 seconds' FROM generate_series(6000, 1, -1) n"
        )
    found = await vitals(database, filled)
    assert "0 in the hour before" not in found["without verdict"].detail
    assert "1 in the hour before" in found["without verdict"].detail
    assert float(found["pace"].value.removesuffix(" a minute")) == pytest.approx(200, rel=0.1)
    assert found["pace"].detail.startswith("newest 10 min; ")


async def test_the_evaluations_at_the_head_have_the_rewards_of_the_curve(filled: FilledRun, database: Database) -> None:
    """A reward may be a fraction, so that its mean is no solve rate."""
    async with database.begin() as connection:
        await connection.exec_driver_sql("UPDATE evaluation SET ended_at = now()")
        await connection.exec_driver_sql("UPDATE rollout SET reward = 0.25 WHERE purpose = 'eval'")
    assert (await vitals(database, filled))["held-out mean reward"].value == "0.25"


async def test_what_people_asked_and_what_is_not_done_yet(filled: FilledRun, database: Database) -> None:
    found = (await vitals(database, filled))["changes by people"]
    assert (found.value, found.detail) == ("none", "no person has changed the run")
    async with database.begin() as connection:
        request = Request(filled.run_id, "1", "anna", "too stale")
        await record(connection, request, SteeringAction.SET, "training.max_staleness", 1, 2, 4)
        await connection.execute(update(RunTable).where(RunTable.run_id == filled.run_id).values(wish="drain"))
    found = (await vitals(database, filled))["changes by people"]
    assert found.value == "1" and found.page == f"/runs/{filled.run_id}/steering"
    assert "not done yet: drain" in found.detail and "set training.max_staleness: 1 → 2" in found.detail
    assert "anna" not in found.detail and "too stale" not in found.detail, "published pages name no person"


async def test_the_pace_is_told_over_the_run_too(filled: FilledRun, database: Database) -> None:
    begun = datetime.now(UTC) - timedelta(minutes=60)
    of_run = update(RunTable).where(RunTable.run_id == filled.run_id)
    async with database.begin() as connection:
        await connection.execute(of_run.values(created_at=begun))
    assert "over the run 6.0 an hour, 6 rollouts" in (await vitals(database, filled))["pace"].detail
    ended = begun + timedelta(minutes=12)
    async with database.begin() as connection:
        await connection.execute(of_run.values(state="done", ended_at=ended))
        values = {"ended_at": ended - timedelta(minutes=2)}
        await connection.execute(update(RolloutTable).where(RolloutTable.outcome.is_not(None)).values(**values))
    found = await vitals(database, filled)
    assert "over the run 30.0 an hour, 6 rollouts" in found["pace"].detail
    assert found["pace"].value == "36.0 an hour", "in the ten minutes before the run's end"
    assert found["without verdict"].value == "1 in the last hour", "in the hour before the run's end"


async def test_no_rate_is_over_a_longer_time_than_the_run(filled: FilledRun, database: Database) -> None:
    now = datetime.now(UTC)
    of_run = update(RunTable).where(RunTable.run_id == filled.run_id)
    async with database.begin() as connection:
        ended = update(RolloutTable).where(RolloutTable.outcome.is_not(None)).values(ended_at=now)
        await connection.execute(ended)
        times = {"created_at": now - timedelta(minutes=3), "ended_at": now + timedelta(minutes=1), "state": "done"}
        await connection.execute(of_run.values(**times))
    found = await vitals(database, filled)
    assert found["pace"].value == "1.5 a minute", "6 in the 4 minutes that the run lasted"
    assert found["pace"].detail == "newest 4 min; over the run 1.5 a minute, 6 rollouts"
    assert found["without verdict"].detail.startswith("1 in all"), "the run had no hour before"
    assert found["began"].detail == f"ended {times['ended_at']:%Y-%m-%dT%H:%M:%SZ}, 4 min later"


async def test_what_there_is_none_of_is_said(database: Database, run_id: str, model: Path) -> None:
    await make_run(database, run_id, make_config(), model)
    async with database.begin() as connection:
        facts = (await read_vitals(connection, await require_run(connection, run_id))).facts
    found = {one.name: one for one in facts}
    assert [found[name].value for name in ("open rollouts", "changes by people")] == ["0", "none"]
    assert found["alarms"].value == "none in the newest step"
    for name in ("training reward", "held-out mean reward", "weights to go on from"):
        assert found[name].value == "none yet", name
    assert found["patches"].value == "0 rejected, 0 flagged" and found["solved"].value == "0 of 0"
    assert found["without verdict"].detail == "0 in all; no error"
    assert found["unsolved"].detail == "no failed test is shared; no last command is shared"
    assert found["engines"].value == "no engine runs"


async def test_engines_are_counted_by_their_weights(filled: FilledRun, database: Database) -> None:
    run = filled.run_id
    async with database.begin() as connection:
        for step in (2, 3):
            version = {"version": f"{run}/{step}.e0", "run_id": run, "step": step, "epoch": 0, "uri": "/w", "files": []}
            await connection.execute(insert(PolicyVersionTable).values(**version))
        for number, label in enumerate((f"{run}/3.e0", f"{run}/2.e0", f"other/9.e0;{run}/3.e0")):
            engine = {"address": f"http://127.0.0.1:{number}", "state": "ready", "model_path": "unused"}
            await connection.execute(insert(EngineTable).values(**engine, version=label))
        silent = update(EngineTable).where(EngineTable.version == f"{run}/2.e0")
        await connection.execute(silent.values(heartbeat_at=datetime.now(UTC) - timedelta(minutes=5), state="syncing"))
    found = (await vitals(database, filled))["engines"]
    assert found.value == "2 of 3 on the newest weights"
    assert re.fullmatch(f"{run}/3.e0, 1 syncing, 1 silent for 5 min( \\d+ s)?", found.detail)
    async with database.begin() as connection:
        well = {"heartbeat_at": func.now(), "state": "ready", "version": f"{run}/3.e0"}
        await connection.execute(update(EngineTable).values(**well))
    found = (await vitals(database, filled))["engines"]
    assert (found.value, found.detail) == ("3 of 3 on the newest weights", f"{run}/3.e0, all answer")


async def test_each_fact_leads_to_a_page(client: httpx.AsyncClient, filled: FilledRun, database: Database) -> None:
    for one in (await vitals(database, filled)).values():
        assert (await client.get(one.page)).status_code == 200, one


async def test_page_and_commands_say_the_same(
    client: httpx.AsyncClient,
    filled: FilledRun,
    database: Database,
    postgres_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()["vitals"]
    found = await diagnose(Stack(tmp_path), filled.run_id)
    assert [one.name for one in found.vitals] == [one["name"] for one in page]
    said = "\n".join(lines_of(found))
    assert all(f"{one.name}: {one.value}" in said for one in found.vitals)
    async with database.begin() as connection:
        told = await explain_thing(connection, filled.run_id)
        await connection.execute(update(RunTable).values(config_name="adhoc"))
        by_hand = await explain_thing(connection, filled.run_id)
    assert told[0] == f"{filled.run_id} is running."
    assert [one.partition(":")[0] for one in told[1 : 1 + len(page)]] == [one["name"] for one in page]
    assert "alarms: 1 in the newest step (no contrast in step 3, 2, 1; entropy 2.1 nats)." in told
    assert by_hand[0] == f"{filled.run_id} holds rollouts by hand; it trains nothing."
    assert not any(one.startswith("training reward") for one in by_hand)
