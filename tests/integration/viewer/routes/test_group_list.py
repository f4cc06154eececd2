"""The list of a run's groups: each state has the groups that its count says, and each group says why."""

from pathlib import Path

import httpx
import pytest
from sqlalchemy import insert, update

from cli.main import run_app
from ratchet.types import GroupProgress, SteeringAction
from reads.groups import _ended_groups
from store import steering
from store.database import Database
from store.groups import GROUP_CANCELLED
from store.schema import BatchItemTable, BatchTable, RunTable
from store.steering import Request
from tests.integration.training.records import make_config, make_run
from tests.integration.viewer.filled_store import FilledRun, RunFiller
from viewer.routes import groups as group_pages

WHY = {
    10: ("ready", "its verdicts are in; it waits for a step"),
    11: ("planned", "step 5 is planned with it"),
    12: ("expired", "none of its tokens may be trained: they are older than training.max_staleness allows"),
    13: ("discarded", "anna@desk discarded a plan of step 4 at "),
    14: ("cancelled", "anna@desk cancelled it: a bad task"),
    15: ("cancelled", "its run has ended"),
    4: ("open", "0 of 2 members have ended"),
    3: ("ready", "its verdicts are in"),
    2: ("failed", "0 rewards, and it needs 2: SandboxLostError: the box is gone"),
    1: ("no_signal", "all of its rewards are 0; step 1 left it out"),
    0: ("trained", "step 1 trained it"),
}
"""Number of a group → its state and why."""


@pytest.fixture
async def filled(filled: FilledRun, database: Database, model: Path) -> FilledRun:
    """The filled run with groups in the other states."""
    run_id = filled.run_id
    stored = {10: "ready", 11: "consumed", 12: "consumed", 13: "cancelled", 14: "cancelled", 15: "cancelled"}
    async with database.begin() as connection:
        filler = RunFiller(connection, run_id, model)
        ids = {number: await filler.group(number, filled.task, state) for number, state in stored.items()}
        ended = {"outcome": "cancelled", "outcome_reason": "its run has ended", "late": True}
        await filler.rollout(ids[15], filled.task, 0, **ended)
        plan = {"run_id": run_id, "step": 5, "members": [], "denominators": [], "knobs": {}, "seed": 0}
        await connection.execute(insert(BatchTable).values(**plan, state="planned"))
        for number, use in ((11, "trained"), (12, "expired")):
            item = {"run_id": run_id, "group_id": ids[number], "step": 5, "use": use}
            await connection.execute(insert(BatchItemTable).values(**item))
        skip, cancel = Request(run_id, "1", "anna@desk", "not finite"), Request(run_id, "2", "anna@desk", "a bad task")
        names = [f"group/{run_id}/{number}" for number in (13, 14)]
        await steering.record(connection, skip, SteeringAction.SKIP_STEP, "step/4", names[:1], "discarded", 4)
        await steering.record(connection, cancel, SteeringAction.CANCEL, names[1], "open", "cancelled", 4)
    return filled


async def test_each_group_has_its_state_and_says_why(client: httpx.AsyncClient, filled: FilledRun) -> None:
    page = (await client.get(f"/runs/{filled.run_id}/groups.json")).json()
    numbers = [one["group_no"] for one in page["groups"]]
    assert numbers == sorted(WHY, reverse=True)
    for one in page["groups"]:
        state, why = WHY[one["group_no"]]
        assert one["state"] == state and one["why"].startswith(why), one
    html = (await client.get(f"/runs/{filled.run_id}")).text
    assert "/groups?purpose=train&state=no_signal" in html


async def test_what_a_run_leaves_when_it_is_cancelled(
    client: httpx.AsyncClient, filled: FilledRun, database: Database, model: Path
) -> None:
    """A group without a step waits no more; a lost box of a group is not why the group was cancelled."""
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        group = await filler.group(16, filled.task, "cancelled")
        lost = {"outcome": "infra_failed", "outcome_reason": "SandboxLostError: the box is gone"}
        await filler.rollout(group, filled.task, 0, **lost)
        await filler.rollout(group, filled.task, 1, outcome="cancelled", outcome_reason=GROUP_CANCELLED, late=True)
        await connection.execute(update(RunTable).where(RunTable.run_id == filled.run_id).values(state="cancelled"))
    listed = (await client.get(f"/runs/{filled.run_id}/groups.json")).json()["groups"]
    why = {one["group_no"]: one["why"] for one in listed}
    assert why[10] == "its verdicts are in; no step took it before the run ended"
    assert why[16] == "its run was cancelled or has ended"


async def test_a_run_on_stored_groups_names_their_run(
    client: httpx.AsyncClient, filled: FilledRun, database: Database, model: Path
) -> None:
    await make_run(database, "stored", make_config(), model)
    source = update(RunTable).where(RunTable.run_id == "stored").values(source_run_id=filled.run_id)
    async with database.begin() as connection:
        await connection.execute(source)
    for page in ("/runs/stored", "/runs/stored/groups"):
        assert f'<a href="/runs/{filled.run_id}/groups">' in (await client.get(page)).text, page


async def test_more_groups_than_a_statement_has_parameters(filled: FilledRun, database: Database) -> None:
    async with database.begin() as connection:
        found = await _ended_groups(connection, range(40_000))
    assert {one.workflow_id for one in found.values()} >= {f"group/{filled.run_id}/{number}" for number in (2, 13, 14)}


async def test_each_state_lists_as_many_groups_as_are_counted(client: httpx.AsyncClient, filled: FilledRun) -> None:
    run = f"/runs/{filled.run_id}/groups.json"
    counts = (await client.get(run)).json()["counts"]
    assert sum(one["number"] for one in counts) == len(WHY)
    for one in counts:
        listed = (await client.get(f"{run}?state={one['state']}&purpose={one['purpose']}")).json()["groups"]
        assert len(listed) == one["number"] and {found["state"] for found in listed} == {one["state"]}
    for state in GroupProgress:
        listed = (await client.get(f"{run}?state={state}")).json()["groups"]
        assert [found["group_no"] for found in listed] == sorted(
            (number for number, (named, _) in WHY.items() if named == state), reverse=True
        )


async def test_pages_lead_through_all_groups(
    client: httpx.AsyncClient, filled: FilledRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_pages, "_PAGE_GROUPS", 4)
    address = f"/runs/{filled.run_id}/groups.json"
    numbers: list[int] = []
    while address:
        page = (await client.get(address)).json()
        numbers += [one["group_no"] for one in page["groups"]]
        address = page["next_page"] and page["next_page"].replace("/groups?", "/groups.json?")
    assert numbers == sorted(WHY, reverse=True)


async def test_the_command_prints_the_same(
    filled: FilledRun, postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["ratchet", "show", "groups", filled.run_id, *arguments])
        code = run_app()
        found = capsys.readouterr()
        return code, found.out + found.err

    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    assert printed("--state", "no signal") == printed("--state", "no_signal")
    code, text = printed("--state", "no_signal")
    assert code == 0 and [line.split()[:3] for line in text.splitlines()[2:]] == [["1", "train", "no"]]
    assert "all of its rewards are 0; step 1 left it out" in text
    code, text = printed("--purpose", "eval", "--json")
    assert code == 0 and '"label": "start-greedy"' in text and text.count('"group_no"') == 1
    code, text = printed("--state", "consumed")
    assert code == 2 and "state: expected one of open, ready, planned, trained" in text
