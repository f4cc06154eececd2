"""The page of a run: what its config may show, and what its numbers are about."""

import httpx
from sqlalchemy import update

from ratchet.store.database import Database
from ratchet.store.schema import RunTable
from tests.integration.viewer.filled_store import FilledRun


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
