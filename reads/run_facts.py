"""One run: how far it is, how its rollouts ended, what is open, and what people asked of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.stored_config import read_stored_config
from reads.curves import Metrics, metrics_by_step, newest_metric_step
from reads.evaluations import EvaluationRate, evaluation_rates
from reads.groups import GroupCount, count_groups_by_progress
from reads.runs import (
    FailureCount,
    FlaggedRollout,
    OutcomeCount,
    RunHead,
    count_failures,
    count_verdicts,
    list_flagged,
    outcome_counts,
)
from reads.steering import SteeringLine, list_requests
from store.engines import EngineRow, list_engines
from store.open_rollouts import OpenRollout, StageCount, count_open_rollouts, list_slowest

_NUM_STEPS = 5
_MAX_LISTED = 10


@dataclass(slots=True, frozen=True)
class RunFacts:
    """The facts about a run that tools and sentences tell. `first` and `last`: metrics of the first and of the newest
    trained steps, by step. `waits`: open rollouts by stage; `slowest`: those that are longest in theirs. `flagged`,
    `failures` and `requests`: the newest or commonest ones."""

    run: RunHead
    num_steps: int
    first: Mapping[int, Metrics]
    last: Mapping[int, Metrics]
    outcomes: Sequence[OutcomeCount] = ()
    failures: Sequence[FailureCount] = ()
    evaluations: Sequence[EvaluationRate] = ()
    groups: Sequence[GroupCount] = ()
    waits: Sequence[StageCount] = ()
    slowest: Sequence[OpenRollout] = ()
    engines: Sequence[EngineRow] = ()
    flagged: Sequence[FlaggedRollout] = ()
    requests: Sequence[SteeringLine] = ()


async def read_run_facts(connection: AsyncConnection, head: RunHead) -> RunFacts:
    run_id = head.run_id
    last = await newest_metric_step(connection, run_id)
    return RunFacts(
        head,
        read_stored_config(head.config).training.steps,
        await metrics_by_step(connection, run_id, 1, min(last, _NUM_STEPS)),
        await metrics_by_step(connection, run_id, max(1, last - _NUM_STEPS + 1), last),
        outcome_counts(await count_verdicts(connection, run_id)),
        await count_failures(connection, run_id, _MAX_LISTED),
        await evaluation_rates(connection, run_id),
        await count_groups_by_progress(connection, run_id),
        await count_open_rollouts(connection, run_id),
        await list_slowest(connection, run_id, _MAX_LISTED),
        await list_engines(connection, head.engine_set),
        await list_flagged(connection, run_id, _MAX_LISTED),
        await list_requests(connection, run_id, limit=_MAX_LISTED),
    )
