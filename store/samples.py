"""Samples: the chains of a run with their rewards and advantages, for an export.

An export contains exactly what was trained. The rows are read page by page, so that a run of any size fits into memory.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ARRAY, BigInteger, Select, any_, literal, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import REWARDED_OUTCOMES, JsonObject
from store import chains
from store.chains import ChainArrays
from store.schema import BatchTable, RolloutGroupTable, RolloutTable, TaskTable, TurnTable

_PAGE_ROLLOUTS = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """One chain of one rollout that has a verdict.

    `reward` is R/K on each of the K chains (`num_chains`) with trained tokens and 0 on the others, so that the samples
    of a rollout add up to R (`rollout_reward`). `step` and `advantage`: of the plan row with the rollout, None without
    one."""

    chain: ChainArrays
    reward: float
    rollout_reward: float
    num_chains: int
    advantage: float | None
    step: int | None
    group_id: int | None
    member: int
    label: str
    agent_exit: str | None
    weight_versions: list[str]
    metadata: JsonObject

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        sampled = np.flatnonzero(self.chain.sampled)
        return int(sampled[0]) if len(sampled) else len(self.chain.ids)


async def samples_of_run(connection: AsyncConnection, run_id: str) -> AsyncIterator[Sample]:
    """Yield all samples of a run, in order of rollouts and chains."""
    planned = await _planned(connection, select(BatchTable.step, BatchTable.members).where(BatchTable.run_id == run_id))
    async for sample in _paged(connection, list(await graded_rollouts(connection, run_id)), planned):
        yield sample


async def samples_of_step(connection: AsyncConnection, run_id: str, step: int) -> AsyncIterator[Sample]:
    """Yield the samples of one plan row, in its order."""
    planned = await _planned(
        connection,
        select(BatchTable.step, BatchTable.members).where(BatchTable.run_id == run_id, BatchTable.step == step),
    )
    async for sample in _paged(connection, list(planned), planned):
        yield sample


async def graded_rollouts(
    connection: AsyncConnection, run_id: str, since: datetime | None = None
) -> dict[int, datetime]:
    """Return id → end of the run's rollouts that have a verdict and ended after `since`, oldest first."""
    is_new = true() if since is None else RolloutTable.ended_at > since
    statement = (
        select(RolloutTable.id, RolloutTable.ended_at)
        .where(RolloutTable.run_id == run_id, RolloutTable.outcome.in_(REWARDED_OUTCOMES), is_new)
        .order_by(RolloutTable.id)
    )
    return {row.id: row.ended_at for row in await connection.execute(statement)}


async def samples_of_rollouts(connection: AsyncConnection, rollout_ids: Sequence[int]) -> AsyncIterator[Sample]:
    """Yield the samples of these rollouts, without step and advantage, which a plan has given to none or some."""
    async for sample in _paged(connection, rollout_ids, {}):
        yield sample


async def planned_steps(connection: AsyncConnection, run_id: str) -> list[int]:
    """Return the steps of the run that have a plan row, in order."""
    return list(
        (
            await connection.execute(
                select(BatchTable.step).where(BatchTable.run_id == run_id).order_by(BatchTable.step)
            )
        ).scalars()
    )


class _PlannedUse(NamedTuple):
    """The step that uses a rollout, and its advantage there."""

    step: int
    advantage: float


async def _planned(connection: AsyncConnection, batches: Select[Any]) -> dict[int, _PlannedUse]:
    return {
        member["rollout_id"]: _PlannedUse(row.step, member["advantage"])
        for row in await connection.execute(batches)
        for member in row.members
    }


async def _paged(
    connection: AsyncConnection, rollout_ids: Sequence[int], planned: dict[int, _PlannedUse]
) -> AsyncIterator[Sample]:
    for start in range(0, len(rollout_ids), _PAGE_ROLLOUTS):
        page = rollout_ids[start : start + _PAGE_ROLLOUTS]
        facts = await _facts(connection, page)
        found = await chains.read_chains(connection, page, trained_only=False)
        versions = await _versions(
            connection, {int(one) for chain in found for one in np.unique(chain.turn_ids[chain.sampled])}
        )
        for chain in found:
            yield _sample(chain, facts[chain.rollout_id], planned.get(chain.rollout_id), versions)


def _sample(chain: ChainArrays, row: Any, plan: _PlannedUse | None, versions: dict[int, list[str]]) -> Sample:
    trains = bool(chain.trained.any())
    turns = dict.fromkeys(chain.turn_ids[chain.sampled].tolist())
    return Sample(
        chain=chain,
        reward=row.reward / row.num_chains if trains else 0.0,
        rollout_reward=row.reward,
        num_chains=row.num_chains,
        advantage=None if plan is None else plan.advantage,
        step=None if plan is None else plan.step,
        group_id=row.group_id,
        member=row.member,
        label=row.label,
        agent_exit=row.agent_exit,
        weight_versions=list(dict.fromkeys(version for turn in turns for version in versions[turn])),
        metadata={
            "run_id": row.run_id,
            "chain": chain.no,
            "task_id": row.task_id,
            "dataset": row.dataset,
            "purpose": row.purpose,
            "harness": row.harness,
            "outcome": row.outcome,
            "reward_components": row.reward_components,
            "temperature": row.temperature,
            "problem": str(row.spec.get("problem_statement") or row.spec.get("prompt") or ""),
        },
    )


async def _facts(connection: AsyncConnection, rollout_ids: Collection[int]) -> dict[int, Any]:
    names = (
        "run_id",
        "group_id",
        "task_id",
        "member",
        "purpose",
        "harness",
        "outcome",
        "reward",
        "reward_components",
        "agent_exit",
    )
    columns = [
        RolloutTable.id,
        RolloutTable.num_chains,
        RolloutTable.temperature,
        *(getattr(RolloutTable, name) for name in names),
    ]
    statement = select(*columns, TaskTable.dataset, TaskTable.label, TaskTable.spec).join(
        TaskTable, TaskTable.id == RolloutTable.task_id
    )
    rows = await connection.execute(
        statement.outerjoin(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id).where(
            RolloutTable.id.in_(rollout_ids)
        )
    )
    return {row.id: row for row in rows}


async def _versions(connection: AsyncConnection, turn_ids: Collection[int]) -> dict[int, list[str]]:
    statement = select(TurnTable.id, TurnTable.version_spans).where(
        TurnTable.id == any_(literal(sorted(turn_ids), ARRAY(BigInteger)))
    )
    return {
        row.id: [span["version"] for span in row.version_spans or []] for row in await connection.execute(statement)
    }
