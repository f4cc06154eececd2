"""The material that each step was trained on: groups, rewards and signal by dataset and by family of tasks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Float, cast, func, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import BatchItemTable, RolloutGroupTable, TaskTable

_MAX_NAMED = 50
"""Datasets or families of one step that get metrics of their own, those with most rollouts first."""


@dataclass(slots=True, frozen=True)
class MixedPart:
    """The consumed groups of one step that belong to one dataset or family. `reward_mean`: of what the step saw.

    `kind`: `dataset`, whose name is its path, or `family`. `num_trained`: groups that the step trains; the others gave
    no signal or were too old.
    """

    step: int
    kind: str
    name: str
    num_groups: int
    num_trained: int
    num_rollouts: int
    reward_mean: float | None


async def step_mix(connection: AsyncConnection, run_id: str, step: int | None = None) -> list[MixedPart]:
    """Return the parts of one step, or of all steps, by step, kind and name."""
    columns = {"dataset": TaskTable.dataset, "family": TaskTable.spec["family"].astext}
    found = [one for kind, column in columns.items() for one in await _parts(connection, run_id, step, kind, column)]
    return sorted(found, key=lambda one: (one.step, one.kind, one.name))


async def _parts(
    connection: AsyncConnection, run_id: str, step: int | None, kind: str, column: Any
) -> Sequence[MixedPart]:
    reward = func.jsonb_array_elements(BatchItemTable.rewards).table_valued("value", name="reward").render_derived()
    statement = (
        select(
            BatchItemTable.step,
            literal(kind),
            column,
            func.count(RolloutGroupTable.id.distinct()),
            func.count(RolloutGroupTable.id.distinct()).filter(BatchItemTable.use == "trained"),
            func.count(reward.c.value),
            func.avg(cast(reward.c.value, Float)),
        )
        .join(RolloutGroupTable, RolloutGroupTable.id == BatchItemTable.group_id)
        .join(TaskTable, TaskTable.id == RolloutGroupTable.task_id)
        .outerjoin(reward, true())
        .where(BatchItemTable.run_id == run_id, column.is_not(None), column != "")
        .group_by(BatchItemTable.step, column)
    )
    if step is not None:
        statement = statement.where(BatchItemTable.step == step)
    return [MixedPart(*row) for row in await connection.execute(statement)]


def mix_metrics(parts: Sequence[MixedPart]) -> dict[str, float]:
    """Return the metrics of one step: `reward_mean/dataset/NAME`, `trained_groups/dataset/NAME`, the same by family.

    A dataset's name is that of its file, with its folder's before it if two are named alike.
    """
    files = Counter(Path(one.name).stem for one in parts if one.kind == "dataset")
    found: dict[str, float] = {}
    for kind in ("dataset", "family"):
        named = sorted((one for one in parts if one.kind == kind), key=lambda one: (-one.num_rollouts, one.name))
        for one in named[:_MAX_NAMED]:
            path = Path(one.name)
            file = path.stem if files[path.stem] == 1 else f"{path.parent.name}_{path.stem}"
            name = file if kind == "dataset" else one.name
            found[f"trained_groups/{kind}/{name}"] = float(one.num_trained)
            if one.reward_mean is not None:
                found[f"reward_mean/{kind}/{name}"] = one.reward_mean
    return found
