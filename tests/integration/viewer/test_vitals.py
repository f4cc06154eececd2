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
from store.schema import (
    BatchTable,
    CheckpointTable,
    EngineTable,
    EvaluationTable,
    PatchTable,
    PolicyVersionTable,
    RolloutTable,
    RunTable,
    RunTaskTable,
    SandboxTable,
)
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
    error = (
        f"infra failed: SandboxLostError: the box is gone (1, 1 in the hour before, such as rollout {filled.failed})"
    )
    assert (found["without verdict"].value, found["without verdict"].detail) == (
        "0 in the last hour",
        f"1 in the hour before, 1 in all; commonest error: {error}",
    )
    assert found["open rollouts"].detail.startswith("1 agent works, for up to ")
    assert found["step"].detail.endswith("2 groups × 4 rollouts each, saved at step 0")
    assert found["training reward"].value == "0.25 in step 1" and found["staleness"].value == "1.5 steps"
    assert found["training reward"].detail == "its first value; 1 of 4 solved over the run"
    solved = found["solved"]
    assert (solved.value, solved.detail) == ("2 of 5", "training 1 of 4, all evaluations 1 of 1; reward of at least 1")
    rate = found["learning rate"]
    assert rate.value == "0.001" and rate.detail.startswith("gradient norm 0.9, ")
    assert rate.detail == "gradient norm 0.9, 180 tokens, 6.0% masked"
    assert found["unsolved"].value == "3"
    assert found["patches"].value == "1 rejected, 1 flagged, 0 of newest 1 unsolved empty"
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


@pytest.mark.parametrize(
    ("step", "temperature", "outcome", "value"),
    [(0, 0.0, "graded", 3), (3, 0.0, "graded", 0), (3, 1.0, "graded", 3), (3, 0.0, "infra_failed", 3)],
)
async def test_the_initial_weights_are_the_best_only_if_others_were_compared(
    filled: FilledRun, database: Database, step: int, temperature: float, outcome: str, value: int
) -> None:
    """Evaluations at the first temperature of the config with enough verdicts are compared."""
    config = make_config(evaluation={"temperatures": [0.0, 1.0]}).model_dump(mode="json")
    async with database.begin() as connection:
        for of in (0, 3):
            version = {"version": f"{filled.run_id}/{of}.e1", "run_id": filled.run_id, "step": of, "epoch": 1}
            await connection.execute(insert(PolicyVersionTable).values(**version, uri="/w", files=[{"name": "w"}]))
        await connection.execute(update(RunTable).values(best_step=0, config=config))
        values = {"ended_at": func.now(), "step": step, "temperature": temperature}
        await connection.execute(update(EvaluationTable).values(**values))
        verdict = {"outcome": outcome, "reward": 0.5 if outcome == "graded" else None}
        await connection.execute(update(RolloutTable).where(RolloutTable.purpose == "eval").values(**verdict))
    found = await vitals(database, filled)
    assert found["weights to go on from"].value == f"{filled.run_id}@{value}"
    assert ("best at step 0" in found["held-out mean reward"].detail) == (value == 0)


async def test_tasks_of_which_nothing_was_trained_are_counted(filled: FilledRun, database: Database) -> None:
    found = (await vitals(database, filled))["tasks without signal"]
    assert (found.value, found.page) == ("0 of 1", f"/runs/{filled.run_id}/tasks#silent")
    assert "1 open, 1 trained, 1 no signal, 1 failed" in found.detail
    async with database.begin() as connection:
        await connection.exec_driver_sql("UPDATE batch_item SET use = 'no_signal'")
    found = (await vitals(database, filled))["tasks without signal"]
    assert found.value == "1 of 1" and "2 no signal" in found.detail
    async with database.begin() as connection:
        await connection.exec_driver_sql("DELETE FROM batch_item")
        await connection.exec_driver_sql("UPDATE rollout_group SET state = 'ready'")
    assert (await vitals(database, filled))["tasks without signal"].value == "0 of 1", "no step has used its groups yet"


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
    assert "commonest error of the last hour: infra failed: the box # is gone (2, " in found.detail
    assert f"such as rollout {filled.failed} with last command `cat calc.py`)" in found.detail


async def test_failures_of_the_last_hour_are_told_from_those_of_the_hour_before(
    filled: FilledRun, database: Database, model: Path
) -> None:
    """Per cause; what fails now comes first, although more has failed for another reason over the run."""
    now = datetime.now(UTC)
    old = {"outcome": "infra_failed", "outcome_reason": "the disk is full", "ended_at": now - timedelta(hours=5)}
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        for member, minutes in enumerate((100, 20, 10), 20):
            ended_at, reason = now - timedelta(minutes=minutes), f"no answer in {member} s"
            lost = {"outcome": "grader_failed", "outcome_reason": reason, "ended_at": ended_at}
            rollout = await filler.rollout(filled.open_group, filled.task, member, outcome="cancelled")
            await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout).values(**lost))
        for member in range(30, 35):
            rollout = await filler.rollout(filled.open_group, filled.task, member, outcome="cancelled")
            await connection.execute(update(RolloutTable).where(RolloutTable.id == rollout).values(**old))
        found = await read_vitals(connection, await require_run(connection, filled.run_id))
    errors = found.failures.of_kind("error")
    hours = [(one.what, one.number, one.in_hour, one.hour_before) for one in errors]
    assert hours[0] == ("grader failed: no answer in # s", 3, 2, 1)
    assert hours[-1] == ("infra failed: the disk is full", 5, 0, 0)
    (told,) = [one.detail for one in found.facts if one.name == "without verdict"]
    assert "commonest error of the last hour: grader failed: no answer in # s (3, 2 in the last hour, 1 in the" in told


async def test_an_empty_patch_says_why(filled: FilledRun, database: Database, model: Path) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        rollouts = {}
        for member, (agent_exit, reason) in enumerate(
            [("done", ""), ("time_budget", ""), ("time_budget", ""), ("done", "the diff has 9 MiB, 8 MiB are allowed")],
            20,
        ):
            ended = {"outcome": "graded", "agent_exit": agent_exit, "reward": 0.0}
            rollouts[member] = rollout = await filler.rollout(filled.open_group, filled.task, member, **ended)
            await filler.verdict(rollout, False)
            empty = update(PatchTable).where(PatchTable.rollout_id == rollout)
            await connection.execute(empty.values(num_bytes=0, num_files=0, reason=reason))
            if member == 21:
                ran = said("", tool_call(1, "bash", command="sleep 900"))
                await filler.turn(await filler.session(rollout), rollout, 0, [], ran, None, fork_cause="root")
        found = await read_vitals(connection, await require_run(connection, filled.run_id))
    empties = found.failures.of_kind("empty")
    assert {one.what: (one.number, one.command, one.example) for one in empties} == {
        "the agent ended by itself": (1, "", rollouts[20]),
        "the agent ran out of time": (2, "sleep 900", rollouts[21]),  # the newer one ran another command or none
        "the diff has # MiB, # MiB are allowed": (1, "", rollouts[23]),
    }
    facts = {one.name: one for one in found.facts}
    assert facts["patches"].value == "1 rejected, 1 flagged, 4 of newest 5 unsolved empty"
    causes = facts["unsolved"].detail.split("; ")
    assert causes[0].startswith("commonest failed test: `test_add of shop-0` (6 of 7 "), "the largest cause comes first"
    told = f"(2 of 5 examined, 2 in the last hour, such as rollout {rollouts[21]} with last command `sleep 900`)"
    assert causes[1] == f"commonest empty patch: the agent ran out of time {told}"


async def test_empty_patches_are_told_with_the_number_that_was_examined(
    filled: FilledRun, database: Database, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        for member in range(20, 172):
            ended = {"outcome": "graded", "agent_exit": "done", "reward": 0.0}
            await filler.verdict(await filler.rollout(filled.open_group, filled.task, member, **ended), False)
        await connection.execute(update(PatchTable).where(PatchTable.rollout_id > filled.running).values(num_bytes=0))
    found = await vitals(database, filled)
    assert found["unsolved"].value == "155"
    assert found["patches"].value == "1 rejected, 1 flagged, 150 of newest 150 unsolved empty"
    assert "empty patch: the agent ended by itself (150 of 150 examined, " in found["unsolved"].detail


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({}, "the slowest of 1 rollouts: agent works for 10 min"),
        ({"state_reason": "no box for an hour"}, "no box for an hour"),
        ({"wish": "drain"}, "a person has asked it to drain; `ratchet show requests {run}` says who"),
        (
            {"state": "paused", "state_reason": "too full"},
            "it is paused: too full; `ratchet resume {run}` lets it go on",
        ),
        ({"state": "done"}, "nothing: it is done"),
        ({"state": "failed", "state_reason": "the disk is full"}, "nothing: it is failed: the disk is full"),
    ],
)
async def test_what_a_run_waits_for_and_since_when(
    filled: FilledRun, database: Database, values: dict[str, str], answer: str
) -> None:
    now = datetime.now(UTC)
    async with database.begin() as connection:
        boxes = update(SandboxTable).where(SandboxTable.rollout_id == filled.running)
        await connection.execute(boxes.values(live_at=now - timedelta(minutes=10)))
        ended = update(RolloutTable).where(RolloutTable.outcome.is_not(None))
        await connection.execute(ended.values(ended_at=now - timedelta(minutes=7)))
        await connection.execute(update(EvaluationTable).values(ended_at=now))
        if values:
            await connection.execute(update(RunTable).where(RunTable.run_id == filled.run_id).values(**values))
    found = (await vitals(database, filled))["waits for"]
    assert found.value.startswith(answer.format(run=filled.run_id)), found.value
    assert found.detail.startswith("the newest rollout ended 7 min") and found.page.endswith("&outcome=open")


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


async def test_the_time_left_counts_the_last_evaluation(filled: FilledRun, database: Database) -> None:
    """A step takes 2 minutes, a rollout of the ended evaluation 1 minute."""
    now = datetime.now(UTC)
    datasets = [{"path": "train.jsonl"}, {"path": "heldout.jsonl", "use": "eval"}]
    config = make_config(datasets=datasets, evaluation={"temperatures": [0.0]})
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(config=config.model_dump(mode="json")))
        task = {"run_id": filled.run_id, "purpose": "eval", "task_id": filled.task, "dataset_no": 1}
        await connection.execute(insert(RunTaskTable), [task | {"position": one} for one in range(12)])
        for step in (2, 3):
            trained = now - timedelta(minutes=2 * (4 - step))
            plan = {"state": "stepped", "members": [], "denominators": [], "knobs": {}, "seed": 0}
            values = plan | {"run_id": filled.run_id, "step": step, "planned_at": trained, "stepped_at": trained}
            await connection.execute(insert(BatchTable).values(**values))
        await connection.execute(
            update(BatchTable).where(BatchTable.step == 1).values(stepped_at=now - timedelta(minutes=6))
        )
        times = {"created_at": now - timedelta(minutes=1), "ended_at": now}
        await connection.execute(update(EvaluationTable).values(**times))
    assert "about 18 min left" in (await vitals(database, filled))["step"].detail, "3 steps, and 12 tasks"
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(step=6))
    assert (await vitals(database, filled))["step"].detail.startswith("all steps are trained")


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
    told = "6 rollouts; last 10 min: 36.0 an hour"
    assert (found["pace"].value, found["pace"].detail) == ("30.0 an hour over the run", told)
    lost = found["without verdict"]
    assert lost.value == "1 in the run's last hour" and "1 in the last hour" not in lost.detail
    assert "commonest error of the run's last hour: " in lost.detail and "(1, 1 in the run's last hour, " in lost.detail
    assert found["waits for"].value == f"nothing since {ended:%Y-%m-%dT%H:%M:%SZ}: it is done"


async def test_no_rate_is_over_a_longer_time_than_the_run(filled: FilledRun, database: Database) -> None:
    now = datetime.now(UTC)
    of_run = update(RunTable).where(RunTable.run_id == filled.run_id)
    async with database.begin() as connection:
        ended = update(RolloutTable).where(RolloutTable.outcome.is_not(None)).values(ended_at=now)
        await connection.execute(ended)
        times = {"created_at": now - timedelta(minutes=3), "ended_at": now + timedelta(minutes=1), "state": "done"}
        await connection.execute(of_run.values(**times))
    found = await vitals(database, filled)
    assert found["pace"].value == "1.5 a minute over the run", "6 in the 4 minutes that the run lasted"
    assert found["pace"].detail == "6 rollouts; last 4 min: 1.5 a minute"
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
    assert found["patches"].value == "0 rejected, 0 flagged, 0 empty" and found["solved"].value == "0 of 0"
    assert found["without verdict"].detail == "0 in all; no error"
    assert found["alarms"].detail == "" and found["learning rate"].detail == ""
    assert found["unsolved"].detail == "no failed test or last command is shared"
    assert found["learning rate"].value == "0.001" and found["waits for"].value == "nothing: rollouts go on"
    assert found["engines"].value == "no engine runs"


async def test_alarms_count_the_steps_that_there_were(filled: FilledRun, database: Database) -> None:
    async with database.begin() as connection:
        await connection.exec_driver_sql("UPDATE metric SET value = 0 WHERE name LIKE 'alarm%%'")
    assert (await vitals(database, filled))["alarms"].detail.startswith("none in the 2 before; entropy ")


async def test_two_evaluations_and_the_checkpoint_are_told_whole(
    filled: FilledRun, database: Database, model: Path
) -> None:
    """The newer evaluation has its own interval; the checkpoint has its time."""
    now = datetime.now(UTC)
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        group = await filler.group(30, filled.task, "ready", purpose="eval", label="end-greedy")
        ended = {"outcome": "graded", "agent_exit": "done", "reward": 0.25, "purpose": "eval"}
        await filler.verdict(await filler.rollout(group, filled.task, 0, **ended), False)
        await connection.exec_driver_sql(
            "INSERT INTO evaluation SELECT (jsonb_populate_record(one, jsonb_build_object('step', 3, 'label',"
            " 'end-greedy'))).* FROM evaluation one"
        )
        await connection.execute(update(EvaluationTable).values(ended_at=now))
        checkpoint = {"run_id": filled.run_id, "step": 3, "epoch": 1, "uri": "/c", "world_size": 1, "num_threads": 1}
        await connection.execute(insert(CheckpointTable).values(**checkpoint, created_at=now))
        await connection.execute(update(RunTable).values(checkpoint_step=3))
    found = await vitals(database, filled)
    assert found["step"].detail.endswith(f"saved at step 3, {now:%Y-%m-%dT%H:%M:%SZ}")
    held_out = found["held-out mean reward"]
    assert held_out.value == "1.00 → 0.25 [0.25, 0.25]"
    assert held_out.detail.startswith("-0.75 [-0.75, -0.75] (95% intervals) from step 0 to 3, 1 tasks")


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
    assert found.value == "2 of 3 answer"
    assert re.fullmatch("2 on newest weights 3.e0, 1 syncing, 1 silent for 5 min( \\d+ s)?", found.detail)
    async with database.begin() as connection:
        well = {"heartbeat_at": func.now(), "state": "ready", "version": f"{run}/3.e0"}
        await connection.execute(update(EngineTable).values(**well))
    found = (await vitals(database, filled))["engines"]
    assert (found.value, found.detail) == ("3 of 3 answer", "3 on newest weights 3.e0")


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
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()["vitals"]["facts"]
    found = await diagnose(Stack(tmp_path), filled.run_id)
    assert [one.name for one in found.vitals] == [one["name"] for one in page]
    said = " ".join(" ".join(lines_of(found)).split())
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
