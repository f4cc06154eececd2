"""Samples: the chains of a run with their rewards and advantages, for an export.

An export contains exactly what was trained. The rows are read page by page, so that a run of any size fits into memory.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import ARRAY, BigInteger, Select, String, any_, cast, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import OPEN_STATES, REWARDED_OUTCOMES, JsonObject, Purpose
from store import chains
from store.chains import ChainArrays
from store.schema import (
    BatchItemTable,
    BatchTable,
    EvaluationTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    TaskTable,
    TurnTable,
)

_PAGE_ROLLOUTS = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """One chain of one rollout.

    `reward` is R/K on each of the K chains (`num_chains`) with trained tokens and 0 on the others, so that the samples
    of a rollout add up to R (`rollout_reward`); both are None without a verdict. `step` and `advantage`: of the plan
    row with the rollout, None without one."""

    chain: ChainArrays
    reward: float | None
    rollout_reward: float | None
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
    graded = (RolloutTable.run_id == run_id) & RolloutTable.outcome.in_(REWARDED_OUTCOMES)
    found = await connection.execute(select(RolloutTable.id).where(graded).order_by(RolloutTable.id))
    async for sample in _paged(connection, list(found.scalars()), planned):
        yield sample


async def samples_of_rollouts(
    connection: AsyncConnection, run_id: str, step: int | None, rollout_ids: Sequence[int]
) -> AsyncIterator[Sample]:
    """Yield samples as the run's plan row of this step uses them; one without tokens for a rollout without chain."""
    of_step = select(BatchTable.step, BatchTable.members).where(BatchTable.run_id == run_id, BatchTable.step == step)
    async for sample in _paged(connection, rollout_ids, await _planned(connection, of_step), with_empty=True):
        yield sample


class StepRollouts(NamedTuple):
    """Rollouts of a step, and the time since which they and their plan are as they are."""

    ids: list[int]
    changed_at: datetime


async def rollouts_by_step(connection: AsyncConnection, run_id: str) -> dict[str, StepRollouts]:
    """Return the rollouts of each step whose rollouts have ended: those of the groups that the step consumed, with
    signal or without. `eval_STEP` stands for evaluations of its weights, `unused` for what an ended run leaves behind.
    """
    state = (await connection.execute(select(RunTable.state).where(RunTable.run_id == run_id))).scalar_one()
    is_over = state not in OPEN_STATES
    own, of_rollout = RolloutTable.run_id == run_id, (RolloutTable.id, RolloutTable.ended_at)
    planned = (BatchTable.run_id == run_id) & (BatchTable.step == BatchItemTable.step)
    trained = select(cast(BatchTable.step, String), *of_rollout, BatchTable.planned_at).select_from(BatchItemTable)
    trained = trained.join(BatchTable, planned).where(BatchItemTable.run_id == run_id)
    trained = trained.join(RolloutTable, RolloutTable.group_id == BatchItemTable.group_id)
    unused = select(literal("unused"), *of_rollout, RolloutTable.created_at).where(own)
    unused = unused.where(RolloutTable.id.not_in(trained.with_only_columns(RolloutTable.id)))
    at = (EvaluationTable.run_id == run_id) & (EvaluationTable.label == RolloutGroupTable.label)
    times = (EvaluationTable.ended_at, EvaluationTable.created_at)
    evaluated = select("eval_" + cast(EvaluationTable.step, String), RolloutTable.id, *times).where(own)
    evaluated = evaluated.join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
    found: dict[str, list[Any]] = {}
    of_ended = [unused.where(RolloutTable.purpose == Purpose.TRAIN)] if is_over else []
    for statement in (trained, evaluated.join(EvaluationTable, at), *of_ended):
        for name, *row in await connection.execute(statement.order_by(RolloutTable.id)):
            found.setdefault(name, []).append(row)
    return {
        name: StepRollouts([row[0] for row in rows], max(one for row in rows for one in row[1:] if one))
        for name, rows in found.items()
        if is_over or all(ended_at for _, ended_at, _ in rows)
    }


class _PlannedUse(NamedTuple):
    """The step that uses a rollout, and its reward and advantage there."""

    step: int
    reward: float
    advantage: float


async def _planned(connection: AsyncConnection, batches: Select[Any]) -> dict[int, _PlannedUse]:
    return {
        member["rollout_id"]: _PlannedUse(row.step, member["reward"], member["advantage"])
        for row in await connection.execute(batches)
        for member in row.members
    }


async def _paged(
    connection: AsyncConnection, rollout_ids: Sequence[int], planned: dict[int, _PlannedUse], with_empty: bool = False
) -> AsyncIterator[Sample]:
    for start in range(0, len(rollout_ids), _PAGE_ROLLOUTS):
        page = rollout_ids[start : start + _PAGE_ROLLOUTS]
        facts = await _facts(connection, page)
        found = await chains.read_chains(connection, page, trained_only=False)
        versions = await _versions(
            connection, {int(one) for chain in found for one in np.unique(chain.turn_ids[chain.sampled])}
        )
        if with_empty:
            missing = [one for one in page if one not in {chain.rollout_id for chain in found}]
            found = sorted([*found, *(chains.empty_chain(one) for one in missing)], key=lambda one: one.rollout_id)
        for chain in found:
            yield _sample(chain, facts[chain.rollout_id], planned.get(chain.rollout_id), versions)


def _sample(chain: ChainArrays, row: Any, plan: _PlannedUse | None, versions: dict[int, list[str]]) -> Sample:
    trains = bool(chain.trained.any())
    turns = dict.fromkeys(chain.turn_ids[chain.sampled].tolist())
    whole = row.reward if plan is None else plan.reward
    share = whole / row.num_chains if trains and whole is not None else 0.0
    return Sample(
        chain=chain,
        reward=None if whole is None else share,
        rollout_reward=whole,
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
    statement = select(RolloutTable, TaskTable.dataset, TaskTable.label, TaskTable.spec).join(
        TaskTable, TaskTable.id == RolloutTable.task_id
    )
    rows = await connection.execute(statement.where(RolloutTable.id.in_(rollout_ids)))
    return {row.id: row for row in rows}


async def _versions(connection: AsyncConnection, turn_ids: Collection[int]) -> dict[int, list[str]]:
    statement = select(TurnTable.id, TurnTable.version_spans).where(
        TurnTable.id == any_(literal(sorted(turn_ids), ARRAY(BigInteger)))
    )
    return {
        row.id: [span["version"] for span in row.version_spans or []] for row in await connection.execute(statement)
    }
