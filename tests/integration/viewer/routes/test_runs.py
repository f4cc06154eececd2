"""The page of a run: what its config may show, and what its numbers are about."""

from pathlib import Path

import httpx
from sqlalchemy import update

from ratchet.store.database import Database
from ratchet.store.schema import RunTable
from tests.integration.viewer.filled_store import FilledRun, RunFiller


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
