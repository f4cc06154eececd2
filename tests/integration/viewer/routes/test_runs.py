"""The page of a run: what its config may show, and what its numbers are about."""

from pathlib import Path

import httpx
from sqlalchemy import func, insert, text, update

from reads.curves import rewards_by_step
from reads.explanations import explain_thing
from reads.run_result import read_steps, run_progress
from store.database import Database
from store.metrics import record_metrics
from store.schema import BatchItemTable, EvaluationTable, GradeTable, RolloutTable, RunTable, RunTaskTable
from tests.integration.training.records import make_config, make_run
from tests.integration.viewer.filled_store import FilledRun, RunFiller, result, said, tool_call


async def test_values_that_a_config_holds_are_not_shown(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    values = {"A": "written-out", "B": "${TOKEN}", "C": "begins-${TOKEN}", "D": ""}
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()
    config = page["head"]["config"]
    config["harness"] = {**config["harness"], "extra_env": values}
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == filled.run_id).values(config=config))
    for address in (f"/runs/{filled.run_id}", f"/runs/{filled.run_id}/steps/1", f"/compare?run={filled.run_id}"):
        path, _, query = address.partition("?")
        for form in (address, f"{path}.json?{query}"):
            text = (await client.get(form)).text
            assert "written-out" not in text and "begins-" not in text, form
    head = (await client.get(f"/runs/{filled.run_id}.json")).json()["head"]
    assert head["config"]["harness"]["extra_env"] == {"A": "***", "B": "${TOKEN}", "C": "***", "D": "***"}


async def test_an_evaluation_counts_what_has_no_verdict(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        for number, (ended, rewards) in enumerate([("graded", [0.0]), ("infra_failed", [None, None])], 80):
            task = await filler.task(number)
            group = await filler.group(number, task, "ready", "eval", "start-greedy")
            for member, reward in enumerate(rewards):
                await filler.rollout(group, task, member, purpose="eval", outcome=ended, reward=reward)
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()
    (found,) = page["evaluations"]
    counts = [found[name] for name in ("num_tasks", "num_rated_tasks", "num_rollouts", "num_graded", "mean")]
    assert counts == [3, 2, 4, 2, 0.5]
    assert not any(chart["name"] == "evaluation" for chart in page["charts"]), "it still runs"
    html = (await client.get(f"/runs/{filled.run_id}")).text
    assert "Without verdict" in html and "of 2 tasks" in html


async def test_groups_of_a_step_count_alike(database: Database, filled: FilledRun) -> None:
    """The interval is over groups, so the mean is, too: also if one group has fewer rewards than another."""
    async with database.begin() as connection:
        fewer = update(BatchItemTable).where(BatchItemTable.use == "no_signal").values(rewards=[0.0])
        await connection.execute(fewer)
        (reward,) = await rewards_by_step(connection, filled.run_id, 1, 1)
    assert (reward.num_groups, reward.num_rollouts, reward.mean) == (2, 3, 0.25)


async def test_the_mean_reward_says_what_it_is_over(
    client: httpx.AsyncClient, filled: FilledRun, database: Database
) -> None:
    """Lists, tiles, charts and commands: all groups that a step consumed; the metric: those with signal."""
    for address in ("/runs", f"/runs/{filled.run_id}", f"/runs/{filled.run_id}/steps/1"):
        html = (await client.get(address)).text
        words = "mean reward of trained groups" if address.endswith("/steps/1") else "training reward"
        assert words in html.lower(), address
    page = (await client.get(f"/runs/{filled.run_id}.json")).json()
    chart = next(one for one in page["charts"] if one["name"] == "reward")
    tile = next(one for one in page["vitals"]["facts"] if one["name"] == "training reward")
    assert chart["title"] == "Training reward" and chart["series"][0]["label"] == "training reward"
    assert page["steps"][-1]["reward"] == chart["series"][0]["values"][-1] == 0.25
    assert tile["value"] == "0.25 in step 1"
    async with database.begin() as connection:
        await connection.execute(update(RunTable).values(step=1))
        progress = await run_progress(connection, filled.run_id, [])
        steps = await read_steps(connection, filled.run_id)
    (summary,) = (await client.get("/runs.json")).json()["runs"]
    assert summary["training_reward"] == progress["reward"] == steps[0]["reward"] == 0.25


async def test_a_long_run_is_charted_behind_the_tokens_of_its_first_steps(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        await record_metrics(connection, filled.run_id, 500, {"trained_tokens": 40.0, "entropy": 0.6})
    for address in (f"/runs/{filled.run_id}.json?axis=tokens", f"/compare.json?run={filled.run_id}&axis=tokens"):
        page = (await client.get(address)).json()
        entropy = next(chart for chart in page["charts"] if chart["name"] == "entropy")
        assert entropy["xs"] == [60 + 120 + 180 + 40], address
    assert "charts from step 500 on" in (await client.get(f"/compare?run={filled.run_id}")).text


async def test_a_list_that_is_cut_says_so(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    address = f"/runs/{filled.run_id}"
    whole = (await client.get(address)).text
    assert "The first" not in whole and "These are the newest" not in whole
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        for member in range(2, 203):
            await filler.rollout(filled.open_group, filled.task, member)
        for member in range(213, 233):
            rollout = await filler.rollout(filled.open_group, filled.task, member, outcome="rejected", reward=0.0)
            await filler.verdict(rollout, False, rejected=True)
    page = (await client.get(f"{address}.json")).json()
    assert [len(page[name]) for name in ("open_rollouts", "flagged")] == [200, 20]
    html = (await client.get(address)).text
    for words in ("The first 200 open rollouts", "All open rollouts", "These are the newest"):
        assert words in html, words


async def test_runs_of_rollouts_by_hand_are_a_list_of_their_own(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    for number in range(11):
        await make_run(database, f"adhoc-{number}", make_config(), model)
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id.like("adhoc-%")).values(config_name="adhoc"))
    page = (await client.get("/runs.json")).json()
    assert [one["run_id"] for one in page["runs"]] == [filled.run_id]
    assert len(page["by_hand"]) == 10 and page["has_more_by_hand"]
    assert all(one["is_by_hand"] for one in page["by_hand"])
    html = (await client.get("/runs")).text
    before, _, behind = html.partition("Rollouts by hand</h2>")
    assert filled.run_id in before and "adhoc-" not in before and ">open</span>" in behind and "running" not in behind
    every = (await client.get("/runs.json?by_hand=true")).json()
    assert len(every["runs"]) == 11 and every["by_hand"] == []
    one = (await client.get("/runs/adhoc-3")).text
    assert "rollouts by hand; it trains nothing" in one and "saved at step" not in one


async def test_a_search_finds_the_tasks_of_the_run_by_label(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    async with database.begin() as connection:
        visited = {"run_id": filled.run_id, "purpose": "train", "position": 0, "task_id": filled.task, "dataset_no": 0}
        await connection.execute(insert(RunTaskTable).values(visited))
    html = (await client.get(f"/search?q=Shop-0&run={filled.run_id}")).text
    assert f'<a href="/tasks/{filled.task}">shop-0</a>' in html
    page = (await client.get(f"/search.json?q=shop_0&run={filled.run_id}")).json()
    assert page["tasks"] == [], "_ is a character, not a pattern"


async def test_flags_are_counted_by_whether_their_verdict_decided_a_reward(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    address = f"/runs/{filled.run_id}"
    assert (await client.get(f"{address}.json")).json()["vitals"]["flagged"] == {
        "num_flagged": 1,
        "num_rejected": 1,
        "num_others": 0,
        "newest_others": [],
    }
    async with database.begin() as connection:
        copied = "rollout_id, patch_id, grader, grader_version, solved, tests, log, duration_seconds, reason"
        flags = """'[{"what": "reads a test", "place": "calc.py:1"}]'"""
        regraded = f"INSERT INTO grade ({copied}, repeat, flags) SELECT {copied}, 1, {flags} FROM grade WHERE "
        await connection.execute(text(f"{regraded} rollout_id = {filled.unsolved}".replace(":", "\\:")))
    counted = (await client.get(f"{address}.json")).json()["vitals"]["flagged"]
    assert counted == {
        "num_flagged": 1,
        "num_rejected": 1,
        "num_others": 1,
        "newest_others": [filled.unsolved],
    }
    html = " ".join((await client.get(address)).text.split())
    assert 'flagged=true">2 rollouts</a> by the verdict that decided the reward: 1 rejected by a rule' in html
    assert f'flag 1 more rollout: <a href="/rollouts/{filled.unsolved}#grades">' in html
    listed = (await client.get(f"/rollouts.json?run={filled.run_id}&flagged=true")).json()["rollouts"]
    assert [one["id"] for one in listed] == [filled.rejected, filled.solved], "as many as the page says"


async def test_a_flagged_verdict_that_decides_no_reward_yet_is_not_counted(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    """The verdict is stored before the control run; the rollout names it only when it ends."""
    address = f"/runs/{filled.run_id}"
    rollout = update(RolloutTable).where(RolloutTable.id == filled.solved)
    counted = {"num_flagged": 0, "num_rejected": 1, "num_others": 0, "newest_others": []}
    async with database.begin() as connection:
        await connection.execute(rollout.values(grade_id=None, reward=None, outcome=None))
    assert (await client.get(f"{address}.json")).json()["vitals"]["flagged"] == counted
    async with database.begin() as connection:
        await connection.execute(rollout.values(outcome="cancelled"))
    counted |= {"num_others": 1, "newest_others": [filled.solved]}
    assert (await client.get(f"{address}.json")).json()["vitals"]["flagged"] == counted


async def test_runs_are_compared_by_settings_and_on_the_same_tasks(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    await make_run(database, "other", make_config(seed=7), model)
    async with database.begin() as connection:
        filler = RunFiller(connection, "other", model)
        group = await filler.group(1, filled.task, "ready", "eval", "end-greedy")
        ended = {"outcome": "graded", "agent_exit": "done", "purpose": "eval"}
        await filler.verdict(await filler.rollout(group, filled.task, 0, **ended, reward=0.0), False)
        evaluation = {"run_id": "other", "label": "end-greedy", "step": 4, "temperature": 0.0, "num_samples": 1}
        await connection.execute(insert(EvaluationTable).values(**evaluation, policy_version="other/4.e0"))
        await connection.execute(update(EvaluationTable).values(ended_at=func.now()))
    address = f"/compare?run={filled.run_id}&run=other"
    page = (await client.get(address.replace("?", ".json?"))).json()
    assert [(one["key"], one["values"]) for one in page["settings"]] == [("seed", [0, 7])]
    (paired,) = page["evaluations"]
    assert (paired["first"], paired["second"]) == (f"{filled.run_id}:start-greedy", "other:end-greedy")
    assert paired["difference"] == {"mean": -1.0, "low": -1.0, "high": -1.0, "num_tasks": 1}
    assert "Settings that differ" in (await client.get(address)).text


async def test_failures_are_in_clusters(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        lost = []
        for member in range(10, 13):
            reason = f"SandboxLostError: box {member}f{member}e of 10.0.0.{member} is gone"
            values = {"outcome": "infra_failed", "outcome_reason": reason}
            lost.append(await filler.rollout(filled.open_group, filled.task, member, **values))
        ended = {"outcome": "graded", "agent_exit": "done", "reward": 0.0}
        unsolved = await filler.rollout(filled.open_group, filled.task, 13, **ended)
        await filler.verdict(unsolved, False)
        tests = {"test_add": "failed", "test_sub": "passed", "test_known": "xfailed"}
        await connection.execute(update(GradeTable).values(tests=tests).where(~GradeTable.solved))
        session = await filler.session(unsolved)
        look = await filler.turn(
            session, unsolved, 0, [], said("", tool_call(1, "bash", command="make test\npwd")), None
        )
        await filler.turn(session, unsolved, 1, [result(1, "ok")], said("Done."), look)
        await filler.turn(
            await filler.session(lost[0]), lost[0], 0, [], said("", tool_call(1, "bash", command="make test")), None
        )
    clusters = (await client.get(f"/runs/{filled.run_id}.json")).json()["vitals"]["failures"]["clusters"]
    found = {(one["kind"], one["what"]): (one["number"], one["example"]) for one in clusters}
    assert found["error", "infra failed: SandboxLostError: box # of #.#.#.# is gone"] == (3, lost[0]), (
        "the one with the last command"
    )
    assert found["test", "test_add of shop-0"][1] == unsolved and found["test", "test_add of shop-0"][0] == 3
    assert found["command", "make test"] == (2, unsolved)
    assert ("error", "rejected: it changed the runner") in found and ("test", "test_sub of shop-0") not in found
    assert ("test", "test_known of shop-0") not in found
    html = (await client.get(f"/runs/{filled.run_id}")).text
    assert '<a href="#failures">' in html and "Same last shell command" in html and "<code>make test</code>" in html
    async with database.begin() as connection:
        sentences = " ".join(await explain_thing(connection, filled.run_id))
    assert f"Failures by last command: `make test` (2 of 7 examined, such as rollout {unsolved})" in sentences
    assert "Failures by error: rejected: it changed the runner (1, " in sentences
