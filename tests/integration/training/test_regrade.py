"""A run trains on a regrade: the new verdict enters the next step's advantages, and no step that is planned already."""

from typing import Any

from sqlalchemy import delete, func, select, update

from activities.grade import grade_row
from activities.regrade import RegradeActivities
from activities.run_configs import RunConfigs
from grading.base import Verdict
from grading.judge_patch import JudgedPatch
from grading.registry import GRADERS
from ratchet.config import RunConfig
from ratchet.grading_payloads import RegradedInput, RegradedResult
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import BatchState, GroupState
from reads import rollouts as rollouts_read
from reads.curves import StepReward, rewards_by_step
from reads.groups import list_groups_of_step
from reads.reward_explanation import explain_reward
from store import grades, rollouts, training_groups
from store.database import Database
from store.samples import samples_of_rollouts
from store.schema import BatchTable, ChainTable, RolloutGroupTable, RolloutTable, RunTable
from store.step_mix import step_mix
from tests.integration.training.records import make_config, make_group, make_run
from training.metrics import group_metrics
from training.planner import load_sequences, load_step_plan, plan_step

FAILED = Verdict(False, "1 fails", "", 1.0)
SOLVED, REJECTED = Verdict(True, "all pass", "", 1.0), Verdict(False, "tampered", "", 1.0, True, "runner_tampered")


async def members_of(database: Database, group_id: int) -> list[int]:
    async with database.begin() as connection:
        return list(
            (
                await connection.execute(
                    select(RolloutTable.id).where(RolloutTable.group_id == group_id).order_by(RolloutTable.member)
                )
            ).scalars()
        )


async def regraded(database: Database, rollout_id: int, *verdicts: Verdict) -> RegradedResult:
    """Store the verdicts as `grade` does, then run the stage that settles them, with `--adopt`."""
    settings = load_temporal_settings()
    activities = RegradeActivities(database, settings, RunConfigs(database, settings))
    async with database.begin() as connection:
        patch = rollouts.NewPatch(
            rollout_id=rollout_id, attempt=1, base_commit="c", diff=b"", num_bytes=10, num_files=1
        )
        patch_id = await rollouts.store_patch(connection, patch)
        rows = [
            grade_row(rollout_id, patch_id, GRADERS["eval_cmd"], JudgedPatch(verdict, [], [])) for verdict in verdicts
        ]
        given = [await grades.store_grade(connection, row) for row in rows]
    return await activities.settle_regrade(
        RegradedInput(rollout_id=rollout_id, patch_id=patch_id, grade_ids=given, adopt=True)
    )


async def advantages(database: Database, run_id: str, config: RunConfig) -> list[float]:
    """Return the advantages of the next step, in the order of its members."""
    async with database.begin() as connection:
        step = await plan_step(connection, run_id, config)
        assert step is not None
        planned = await load_step_plan(connection, run_id, step)
        await connection.execute(
            update(BatchTable)
            .where(BatchTable.run_id == run_id, BatchTable.step == step)
            .values(state=BatchState.STEPPED)
        )
    assert planned is not None
    return [member.advantage for member in sorted(planned.members, key=lambda member: member.rollout_id)]


async def test_the_next_step_uses_the_new_verdict(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [1.0, 0.0, 0.0, 0.0])
    members = await members_of(database, group_id)
    result = await regraded(database, members[1], SOLVED)
    assert (result.adopted, result.solved) == (True, 1)
    assert await advantages(database, run_id, config) == [0.5, 0.5, -0.5, -0.5]
    async with database.begin() as connection:
        planned = await load_step_plan(connection, run_id, 1)
        trained = await load_sequences(connection, members, 0)
    assert (await regraded(database, members[2], SOLVED)).adopted and (
        await regraded(database, members[0], FAILED)
    ).adopted
    async with database.begin() as connection:
        assert await load_step_plan(connection, run_id, 1) == planned is not None, "a replay trains what was planned"
        again = await load_sequences(connection, members, 0)
        assert [one.ids.tolist() for one in again] == [one.ids.tolist() for one in trained]
        ready = await training_groups.ready_groups(connection, run_id, "train", states=[GroupState.CONSUMED])
        assert ready[0].rewards == [0.0, 1.0, 1.0, 0.0], "a run that trains on the stored group gets the new verdicts"


async def test_what_a_step_saw_stays_beside_a_new_verdict(database: Database, run_id: str) -> None:
    """Curve, parts, metrics, group lists, exports and explanations of a step show the rewards that it was planned with,
    also those of a group that it left out.
    """
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        left_out = await make_group(connection, run_id, 0, [0.0, 0.0])
        group_id = await make_group(connection, run_id, 1, [1.0, 0.0, 0.0, 0.0])
        await connection.execute(update(RolloutTable).values(num_chains=1))
    assert await advantages(database, run_id, config) == [0.75, -0.25, -0.25, -0.25]

    async def shown() -> list[Any]:
        async with database.begin() as connection:
            lines = await list_groups_of_step(connection, run_id, 1)
            samples = [one async for one in samples_of_rollouts(connection, run_id, 1, [members[0]])]
            rewards = await rollouts_read.read_group_rewards(connection, run_id, group_id)
            return [
                await rewards_by_step(connection, run_id, 1, 1),
                await step_mix(connection, run_id, 1),
                group_metrics(await training_groups.consumed_groups(connection, run_id, 1)),
                [(one.group_no, one.lowest, one.highest, one.use) for one in lines],
                [one.rollout_reward for one in samples],
                rewards.rewards,
            ]

    members = await members_of(database, group_id)
    before = await shown()
    assert before[0] == [StepReward(1, 6, 2, 0.125, before[0][0].deviation, 0.0, 1.0)]
    assert before[3] == [(0, 0.0, 0.0, "no_signal"), (1, 0.0, 1.0, "trained")]
    assert (before[4], before[5]) == ([1.0] * len(before[4]), [1.0, 0.0, 0.0, 0.0])
    for rollout_id in [*members, *await members_of(database, left_out)]:
        assert (await regraded(database, rollout_id, FAILED if rollout_id == members[0] else SOLVED)).adopted
    assert await shown() == before
    async with database.begin() as connection:
        head = await rollouts_read.require_rollout(connection, members[0])
        facts = await rollouts_read.read_rollout_facts(connection, head)
    assert facts.rollout.reward == 0.0
    said = " ".join(one.text for one in explain_reward(facts))
    assert "Its reward is 0" in said and "advantage in step 1 is +0.75" in said and "its reward was 1 then" in said


async def test_a_rejected_patch_is_in_the_baseline_without_reward(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [1.0, 1.0, 0.0, 0.0])
    members = await members_of(database, group_id)
    assert (await regraded(database, members[1], REJECTED)).adopted
    async with database.begin() as connection:
        assert (
            await connection.execute(select(RolloutTable.outcome).where(RolloutTable.id == members[1]))
        ).scalar_one() == "rejected"
    found = await advantages(database, run_id, config)
    assert found == [0.75, -0.25, -0.25, -0.25] and found[1] <= found[2]


async def test_a_rollout_that_was_ended_without_chains_trains_on_its_turns(database: Database, run_id: str) -> None:
    """The sweep ends a rollout whose workflow was terminated: it has turns, but no chains derived from them yet."""
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [0.0, 0.0, 0.0, 0.0])
        swept = (
            select(RolloutTable.id).where(RolloutTable.group_id == group_id, RolloutTable.member == 1).scalar_subquery()
        )
        await connection.execute(delete(ChainTable).where(ChainTable.rollout_id == swept))
        values = {"outcome": "infra_failed", "reward": None, "num_turns": 0, "num_trained_tokens": 0}
        await connection.execute(update(RolloutTable).where(RolloutTable.id == swept).values(**values))
    members = await members_of(database, group_id)
    assert (await regraded(database, members[1], SOLVED)).adopted
    assert await advantages(database, run_id, config) == [-0.25, 0.75, -0.25, -0.25]
    async with database.begin() as connection:
        row = (await connection.execute(select(RolloutTable).where(RolloutTable.id == members[1]))).one()
        assert row.num_turns == 3 and row.num_trained_tokens > 0
        assert await load_sequences(connection, [members[1]], 0)


async def test_a_group_that_lacked_verdicts_is_trained_once_it_has_them(database: Database, run_id: str) -> None:
    config = make_config(training={"groups_per_step": 1})
    await make_run(database, run_id, config)
    missing = {"outcome": "grader_failed", "reward": None}
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [0.0] * 4, members=[{}, missing, missing, missing])
        await connection.execute(
            update(RolloutGroupTable).where(RolloutGroupTable.id == group_id).values(state=GroupState.FAILED)
        )
        assert await plan_step(connection, run_id, config) is None
    members = await members_of(database, group_id)
    assert (await regraded(database, members[1], SOLVED)).adopted
    assert await advantages(database, run_id, config) == [-0.5, 0.5]


async def test_patches_are_read_in_pages(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [0.0] * 5)
    members = await members_of(database, group_id)
    async with database.begin() as connection:
        for rollout_id in members:
            for attempt in (1, 2):
                await rollouts.store_patch(connection, rollouts.NewPatch(rollout_id, attempt, "c", b"", 0, 0))
        pages, after = [], 0
        while page := await grades.patches_to_regrade(connection, run_id, None, after, 2):
            pages.append([(patch.rollout_id, patch.attempt) for patch in page])
            after = page[-1].rollout_id
    first, second, third, fourth, fifth = ((one, 2) for one in members)
    assert pages == [[first, second], [third, fourth], [fifth]], "the last patch of each rollout"


async def test_nothing_is_adopted_once_the_turns_are_archived(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    async with database.begin() as connection:
        group_id = await make_group(connection, run_id, 0, [0.0, 1.0])
        await connection.execute(update(RunTable).values(pruned_at=func.now()))
    members = await members_of(database, group_id)
    assert not (await regraded(database, members[0], SOLVED)).adopted
