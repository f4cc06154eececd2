"""The groups that a step was trained on, by dataset and by family."""

from typing import Any

import pytest
from sqlalchemy import func, select, update

from store import training_groups
from store.database import Database
from store.schema import RolloutGroupTable, TaskTable
from store.step_mix import MixedPart, mix_metrics, step_mix
from tests.integration.training.records import make_config, make_group, make_run


async def test_groups_and_rewards_by_dataset_and_family(database: Database, run_id: str) -> None:
    await make_run(database, run_id, make_config())
    uses = [([1.0, 0.0], "/data/a.jsonl", "x", 1, "trained"), ([0.0, 0.0], "/data/a.jsonl", "x", 1, "no_signal")]
    uses += [([1.0, 1.0], "/data/b.jsonl", "", 1, "trained"), ([1.0, 0.0], "/data/b.jsonl", "y", 2, "trained")]
    async with database.begin() as connection:
        for number, (rewards, dataset, family, step, use) in enumerate(uses):
            group = await make_group(connection, run_id, number, rewards)
            task = select(RolloutGroupTable.task_id).where(RolloutGroupTable.id == group).scalar_subquery()
            values: dict[str, Any] = {"dataset": dataset, "spec": {"family": family}}
            await connection.execute(update(TaskTable).where(TaskTable.id == task).values(**values))
            await training_groups.consume_ready_groups(connection, run_id, [group], step, use)
        found = await step_mix(connection, run_id, 1)
        assert found == [
            MixedPart(1, "dataset", "/data/a.jsonl", 2, 1, 4, 0.25),
            MixedPart(1, "dataset", "/data/b.jsonl", 1, 1, 2, 1.0),
            MixedPart(1, "family", "x", 2, 1, 4, 0.25),
        ]
        assert {one.step for one in await step_mix(connection, run_id)} == {1, 2}
        assert (await connection.execute(select(func.count()).select_from(TaskTable))).scalar_one() == len(uses)
    metrics = mix_metrics(found)
    assert metrics["reward_mean/dataset/a"] == 0.25 and metrics["trained_groups/family/x"] == 1.0


@pytest.mark.parametrize(("count", "expected"), [(3, 3), (80, 50)])
def test_a_step_gets_metrics_of_a_bounded_number_of_families(count: int, expected: int) -> None:
    parts = [MixedPart(1, "family", f"f{number:03}", 1, 1, number, 0.5) for number in range(count)]
    names = [name for name in mix_metrics(parts) if name.startswith("reward_mean/family/")]
    assert len(names) == expected and f"reward_mean/family/f{count - 1:03}" in names, "those with most rollouts"


def test_datasets_whose_files_are_named_alike_keep_their_own_metrics() -> None:
    parts = [MixedPart(1, "dataset", f"/{folder}/train.jsonl", 1, 1, 2, 0.5) for folder in ("python", "rust")]
    assert set(mix_metrics(parts)) == {
        f"{metric}/dataset/{folder}_train"
        for metric in ("reward_mean", "trained_groups")
        for folder in ("python", "rust")
    }
