"""A task's own view on the page of a rollout: by its dataset or its grader, escaped, and never the end of the page."""

from typing import Any

import httpx
import pytest
from sqlalchemy import insert, update

from activities import run_checks
from ratchet.errors import ConfigError
from ratchet.temporal_settings import load_temporal_settings
from store.database import Database
from store.schema import RunTable, RunTaskTable, TaskTable
from tests.integration.training.records import make_config
from tests.integration.viewer.filled_store import FilledRun
from viewer.renderers.registry import MAX_ROWS


async def set_up(database: Database, filled: FilledRun, *renderers: str | None, dataset_no: int = 0) -> None:
    """Give the run a dataset per renderer, and the task the place of a row of one of them."""
    config = make_config(datasets=[{"path": "unused.jsonl", "renderer": one} for one in renderers])
    planned = {"run_id": filled.run_id, "purpose": "train", "position": 0, "task_id": filled.task}
    async with database.begin() as connection:
        of_run = update(RunTable).where(RunTable.run_id == filled.run_id)
        await connection.execute(of_run.values(config=config.model_dump(mode="json")))
        await connection.execute(insert(RunTaskTable).values(**planned, dataset_no=dataset_no))


async def own_parts(client: httpx.AsyncClient, rollout_id: int) -> list[dict[str, Any]]:
    return list((await client.get(f"/rollouts/{rollout_id}.json")).json()["own_parts"])


async def test_the_datasets_renderer_gets_the_rollout_and_adds_no_markup(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    assert 'id="own"' not in (await client.get(f"/rollouts/{filled.solved}")).text
    await set_up(database, filled, None, "tests.standins.renderers:facts", dataset_no=1)
    html = (await client.get(f"/rollouts/{filled.solved}")).text
    own = html.partition('id="own"')[2].partition("</section>")[0]
    assert "asked: add() subtracts. Mend it." in own and "<td>cat calc.py</td><td>1.0</td>" in own
    assert '<span class="added">' in own and "return a + b" in own and "<script>" not in own
    assert own.count("&lt;script&gt;") >= 3


async def test_another_datasets_renderer_is_not_used(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    await set_up(database, filled, None, "tests.standins.renderers:facts", dataset_no=0)
    assert await own_parts(client, filled.solved) == []


@pytest.mark.parametrize(
    ("renderer", "said"),
    [
        ("breaks", "KeyError: 'no such metadata'"),
        ("returns_texts", "AttributeError"),
        ("is_missing", "cannot be imported"),
    ],
)
async def test_a_renderer_that_fails_is_named_on_a_page_that_is_shown(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, renderer: str, said: str
) -> None:
    await set_up(database, filled, f"tests.standins.renderers:{renderer}")
    page = await client.get(f"/rollouts/{filled.solved}")
    assert page.status_code == 200 and 'id="conversation"' in page.text
    (part,) = await own_parts(client, filled.solved)
    assert said in part["text"] and f"tests.standins.renderers:{renderer}" in part["text"]


async def test_a_page_shows_a_bounded_number_of_rows(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    await set_up(database, filled, "tests.standins.renderers:has_many_rows")
    (part,) = await own_parts(client, filled.solved)
    assert len(part["rows"]) == MAX_ROWS + 1


async def test_a_grader_brings_the_renderer_of_its_family(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    listed = {"fail_to_pass": ["test_add"], "pass_to_pass": ["test_sub", "test_lost"]}
    async with database.begin() as connection:
        of_task = update(TaskTable).where(TaskTable.id == filled.task)
        await connection.execute(of_task.values(grader="swe_bench", spec={"swe_bench": listed}))
    html = (await client.get(f"/rollouts/{filled.unsolved}")).text
    own = html.partition('id="own"')[2].partition("</section>")[0]
    assert "0 of 1 tests that must newly pass did, 1 of 2 that must still pass" in own
    assert "<td>test_add</td><td>newly pass</td><td>failed</td>" in own and "<td>not seen</td>" in own


def test_a_renderer_that_does_not_exist_is_refused_before_the_run() -> None:
    config = make_config(datasets=[{"path": "unused.jsonl", "renderer": "tests.standins.renderers:is_missing"}])
    with pytest.raises(ConfigError, match=r"datasets\.renderer: .*is_missing"):
        run_checks.check_run(config, load_temporal_settings())
