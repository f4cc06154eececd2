"""The page of a rollout with more turns than its time line shows."""

from pathlib import Path

import httpx
from sqlalchemy import select

from ratchet.store.database import Database
from ratchet.store.sandboxes import installation_id
from ratchet.store.schema import TurnTable
from ratchet.tracing import RolloutTrace
from tests.integration.viewer.filled_store import FilledRun, RunFiller, said
from viewer.app import create_viewer_app
from viewer.settings import ViewerSettings

NUM_TURNS = 530


async def test_every_turn_of_a_long_rollout_is_reached(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        rollout = await filler.rollout(filled.open_group, filled.task, 7, outcome="graded", reward=0.0)
        session = await filler.session(rollout)
        before = None
        for number in range(NUM_TURNS):
            before = await filler.turn(session, rollout, number, [], said("Yes."), before)
        statement = select(TurnTable.id).where(TurnTable.rollout_id == rollout).order_by(TurnTable.id)
        ids = list((await connection.execute(statement)).scalars())
    for at in (0, 24, 25, 26, 499, 500, 515, NUM_TURNS - 1):
        linked = await client.get(f"/rollouts/{rollout}/turns/{ids[at]}")
        assert linked.status_code == 303, at
        html = (await client.get(linked.headers["location"])).text
        assert f'id="turn-{ids[at]}"' in html and f">Turn {at + 1}</a>" in html, at
        assert at < 25 or f'id="turn-{ids[at - 1]}"' in html, "it begins with the turn before"
    assert (await client.get(f"/rollouts/{rollout}/turns/{ids[-1] + 1}")).status_code == 404
    assert (await client.get(f"/rollouts/{filled.solved}/turns/{ids[0]}")).status_code == 404

    numbers: list[int] = []
    address: str | None = f"/rollouts/{rollout}"
    while address:
        path, _, query = address.partition("?")
        page = (await client.get(f"{path}.json?{query}")).json()
        numbers += [turn["number"] for turn in page["turns"]]
        address = page["next_page"]
        assert len(numbers) <= NUM_TURNS
    assert numbers == list(range(1, NUM_TURNS + 1))
    assert "first 500 of 530 turns" in (await client.get(f"/rollouts/{rollout}")).text


async def test_the_page_links_to_the_rollouts_trace(database: Database, filled: FilledRun) -> None:
    async with database.begin() as connection:
        trace = RolloutTrace.of(await installation_id(connection), filled.solved)
    link = '<a href="https://traces.example/{}">trace</a>'
    for url in ("https://traces.example/{trace_id}", ""):
        app = create_viewer_app(ViewerSettings(database.url, trace_url=url))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8420") as client,
        ):
            html = (await client.get(f"/rollouts/{filled.solved}")).text
            assert (link.format(trace.hex) in html) == (">trace</a>" in html) == bool(url)
            assert (await client.get(f"/rollouts/{filled.solved}.json")).json()["trace_id"] == trace.hex
