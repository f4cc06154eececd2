"""A run that begins from a step of another one and trains the plan rows after it again, with the rewards of now."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from ratchet.types import GroupState
from reads.curves import metrics_by_step
from reads.recall import retrained_runs
from store import retention, steering
from store.database import Database
from store.schema import BatchItemTable, BatchTable, RolloutGroupTable, RunTable
from store.steering import Request
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_group, make_planned_run, make_run
from tests.integration.training.test_regrade import FAILED, SOLVED, members_of, regraded
from training import planner
from training.rank_runtime import RankSettings

Uses = dict[int, tuple[int, str]]


def begun(source: str, step: int, staleness: int = 3, **training: int) -> RunConfig:
    return make_config(
        init_from=f"{source}@{step}",
        retrain=True,
        training={"groups_per_step": 1, "steps": 4, "max_staleness": staleness, **training},
    )


async def plan_again(database: Database, run_id: str, config: RunConfig) -> Uses:
    """Make the run with its plan rows; return group number → its step and use."""
    await make_run(database, run_id, config)
    query = select(RolloutGroupTable.group_no, BatchItemTable.step, BatchItemTable.use).join(
        BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id
    )
    async with database.begin() as connection:
        num_steps = await planner.plan_again(connection, run_id, config)
        rows = await connection.execute(query.where(BatchItemTable.run_id == run_id))
        planned = select(func.count()).select_from(BatchTable).where(BatchTable.run_id == run_id)
        assert (await connection.execute(planned)).scalar_one() == num_steps
        return {row[0]: (row[1], row[2]) for row in rows}


@pytest.fixture
async def groups(database: Database, run_id: str) -> list[int]:
    """Groups 0, 2, 3 and 4 of a run were trained in its steps 1 to 4; group 1 was left out for step 2. Since then, that
    one has got signal, group 2 has lost its own.
    """
    config = make_config(training={"groups_per_step": 1, "steps": 4, "max_staleness": 3})
    await make_run(database, run_id, config)
    found = []
    async with database.begin() as connection:
        for number, rewards in enumerate([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]):
            found.append(await make_group(connection, run_id, number, rewards, step=max(0, number - 2)))
            if number != 1:
                assert await planner.plan_step(connection, run_id, config) == max(1, number)
                await connection.execute(update(BatchTable).values(state="stepped"))
    won, lost = [await members_of(database, found[number]) for number in (1, 2)]
    assert (await regraded(database, won[1], SOLVED)).adopted and (await regraded(database, lost[0], FAILED)).adopted
    return found


@pytest.mark.parametrize(
    ("step", "staleness", "uses"),
    [
        (1, 3, {1: (1, "trained"), 2: (1, "no_signal"), 3: (2, "trained")}),  # 2 (2 - 1) <= 3, and 2 (3 - 1) is not
        (1, 1, {1: (1, "trained"), 2: (1, "no_signal")}),
        (3, 3, {4: (1, "trained")}),
        (4, 3, {}),
    ],
)
async def test_the_rows_of_the_source_with_the_rewards_of_now(
    database: Database, run_id: str, groups: list[int], step: int, staleness: int, uses: Uses
) -> None:
    name = f"{run_id}-again"
    assert await plan_again(database, name, begun(run_id, step, staleness)) == uses
    async with database.begin() as connection:
        first = await planner.load_step_plan(connection, name, 1)
        assert await planner.plan_step(connection, name, begun(run_id, step, staleness)) == (1 if uses else None)
        states = select(RolloutGroupTable.state).where(RolloutGroupTable.id.in_(groups))
        assert set((await connection.execute(states)).scalars()) == {GroupState.CONSUMED}
    if step == 1:
        assert first is not None and first.knobs["source_run_id"] == run_id
        assert sorted((one.reward, one.advantage) for one in first.members) == [(0.0, -0.5), (1.0, 0.5)]


async def test_a_row_without_signal_is_passed_over(database: Database, run_id: str, groups: list[int]) -> None:
    lost = await members_of(database, groups[1])
    assert (await regraded(database, lost[1], FAILED)).adopted
    name = f"{run_id}-again"
    assert await plan_again(database, name, begun(run_id, 1)) == {3: (1, "trained")}
    async with database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == name).values(init_from=f"{run_id}@1"))
        said = await retrained_runs(connection, name)
    assert f"2 of its trained groups not trained again: group/{run_id}/2, group/{run_id}/4;" in said[0]
    assert await plan_again(database, f"{run_id}-short", begun(run_id, 1, steps=0)) == {}


async def test_both_runs_say_what_differs(database: Database, run_id: str, groups: list[int]) -> None:
    """Also a run that trains the rows of a run again that has trained them again, and one that found none."""
    name = f"{run_id}-again"
    await plan_again(database, name, begun(run_id, 1))
    assert await plan_again(database, f"{name}-2", begun(name, 0)) == {
        1: (1, "trained"),
        2: (1, "no_signal"),
        3: (2, "trained"),
    }
    await plan_again(database, f"{run_id}-none", begun(run_id, 4))
    async with database.begin() as connection:
        for one in (name, f"{name}-2", f"{run_id}-none"):
            source = f"{name}@0" if one.endswith("2") else f"{run_id}@{4 if one.endswith('none') else 1}"
            await connection.execute(update(RunTable).where(RunTable.run_id == one).values(init_from=source))
        of_source, of_first, of_second = [await retrained_runs(connection, one) for one in (run_id, name, f"{name}-2")]
    first = (
        f"{name} begins from {run_id}@1: 3 groups of {run_id} in steps 1 to 2, 2 with other rewards (1 lost their "
        f"signal: group/{run_id}/2); 1 of its trained groups not trained again: group/{run_id}/4; it samples anew from "
        "step 3 on"
    )
    second = f"{name}-2 begins from {name}@0: 3 groups of {name} in steps 1 to 2, 0 with other rewards"
    assert of_source == [first, f"{run_id}-none begins from {run_id}@4: no group; it samples anew from step 1 on"]
    assert of_first == [first, f"{second}; it samples anew from step 3 on"]
    assert of_second == of_first[1:]


async def test_a_skipped_step_leaves_the_source_and_no_gap(database: Database, run_id: str, groups: list[int]) -> None:
    name = f"{run_id}-again"
    await plan_again(database, name, begun(run_id, 1))
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match="trains on its stored turns"):
            await connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(state="done"))
            await retention.may_prune(connection, run_id, force=False)
        await connection.execute(update(RunTable).where(RunTable.run_id == name).values(state="paused"))
        await steering.record_skipped_step(connection, Request(name, "r", "anna", "its gradient is not finite"))
        assert await planner.plan_step(connection, name, begun(run_id, 1)) is None, "step 1 is planned from others"
        states = select(RolloutGroupTable.state).where(RolloutGroupTable.id.in_(groups))
        assert set((await connection.execute(states)).scalars()) == {GroupState.CONSUMED}


async def test_it_needs_a_step_of_a_run(database: Database, run_id: str) -> None:
    config = make_config(init_from="/models/x", retrain=True)
    async with database.begin() as connection:
        with pytest.raises(ConfigError, match="retrain: init_from must be RUN@step, found '/models/x'"):
            await planner.plan_again(connection, run_id, config)


async def test_the_learner_measures_how_far_the_policy_is_from_the_one_that_sampled(
    database: Database, model: Path, tmp_path: Path, run_id: str
) -> None:
    """The first steps are the source's, bit by bit where the rewards are the same, and have no staleness."""
    config = make_config(training={"steps": 2})
    policies, name = tmp_path / "policies", f"{run_id}-again"
    await make_planned_run(database, run_id, config, model, policies)
    await asyncio.to_thread(
        supervise, RankSettings(run_id, database.url, policies, tmp_path / "checkpoints"), 1, tmp_path / run_id
    )
    again = config.model_copy(update={"init_from": f"{run_id}@0", "retrain": True})
    await make_run(database, name, again, model, policies)
    async with database.begin() as connection:
        assert await planner.plan_again(connection, name, again) == 2
    await asyncio.to_thread(
        supervise, RankSettings(name, database.url, policies, tmp_path / "checkpoints"), 1, tmp_path / name
    )
    async with database.begin() as connection:
        old, new = [await metrics_by_step(connection, one, 1, 2) for one in (run_id, name)]
    assert "staleness_mean" in old[1] and "staleness_mean" not in new[1]
    for key in ("loss", "mismatch_kl", "ratio_ess", "masked_fraction"):
        assert [new[step][key] for step in (1, 2)] == [old[step][key] for step in (1, 2)]
