"""The page of a group says that there is no signal if, and only if, no reward that counts differs from another."""

from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from store.database import Database
from store.schema import RolloutTable
from tests.integration.viewer.filled_store import FilledRun, RunFiller

SOLVED = {"outcome": "graded", "reward": 1.0}
UNSOLVED = {"outcome": "graded", "reward": 0.0}
RUNNING: dict[str, object] = {}
LATE = {**SOLVED, "late": True}
LOST = {"outcome": "infra_failed"}
REPLACED = {**SOLVED, "replaced": True}


@pytest.mark.parametrize(
    ("state", "purpose", "members", "expected"),
    [
        ("ready", "train", [UNSOLVED] * 16 + [SOLVED], True),
        ("ready", "train", [REPLACED] * 16 + [SOLVED, UNSOLVED], True),
        ("ready", "train", [UNSOLVED, UNSOLVED, REPLACED, LATE, LOST], False),
        ("open", "train", [UNSOLVED, UNSOLVED, RUNNING], None),
        ("open", "train", [UNSOLVED, UNSOLVED, LOST], None),
        ("ready", "eval", [UNSOLVED, UNSOLVED], None),
        ("ready", "train", [SOLVED, LOST], None),
    ],
)
async def test_signal(
    client: httpx.AsyncClient,
    database: Database,
    filled: FilledRun,
    model: Path,
    state: str,
    purpose: str,
    members: list[dict[str, object]],
    expected: bool | None,
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        group = await filler.group(90, filled.task, state, purpose)
        ids = []
        for number, values in enumerate(members):
            columns = {name: value for name, value in values.items() if name != "replaced"}
            ids.append(await filler.rollout(group, filled.task, number, purpose=purpose, **columns))
        replaced = [one for one, values in zip(ids, members, strict=True) if "replaced" in values]
        await connection.execute(update(RolloutTable).where(RolloutTable.id.in_(replaced)).values(replaced_by=ids[-1]))
    page = (await client.get(f"/groups/{group}.json")).json()
    assert page["has_signal"] is expected
    shown = {one["rollout"]["id"] for one in page["members"]} | {one["id"] for one in page["others"]}
    assert shown == set(ids)
    html = (await client.get(f"/groups/{group}")).text
    assert ("No signal" in html) == (expected is False)
    assert all(f'href="/rollouts/{one}"' in html for one in ids)


async def test_a_cancelled_group_is_not_one_that_a_step_may_use_yet(
    client: httpx.AsyncClient, database: Database, filled: FilledRun, model: Path
) -> None:
    async with database.begin() as connection:
        filler = RunFiller(connection, filled.run_id, model)
        group = await filler.group(91, filled.task, "cancelled", "train")
        rollout = await filler.rollout(group, filled.task, 0, purpose="train", **SOLVED)
        await filler.rollout(group, filled.task, 1, purpose="train", **UNSOLVED)
    why = (await client.get(f"/rollouts/{rollout}.json")).json()["why"]
    assert why[-1]["text"].endswith("the group has been cancelled, so no step uses it.")
    tasks = (await client.get(f"/runs/{filled.run_id}/tasks.json")).json()
    (task,) = [one["task"] for one in tasks["useful"] if one["task"]["task_id"] == filled.task]
    assert task["num_cancelled"] == 1
