"""The tables: what is true.

Why here: constraints hold the promises (an outcome has a reward exactly when a verdict exists; a group enters one step).
Called by: the files of this folder, one per aggregate, and the alembic migrations.

Token arrays are bytea: little-endian int32 ids, float32 logprobs (`ratchet.store.arrays`). Times are timestamptz by Postgres `now()`.
"""

from ratchet.store.schema.base import Base
from ratchet.store.schema.rollouts import (
    GROUP_READY_SEQ,
    Admission,
    Attempt,
    Chain,
    ChainSpan,
    Grade,
    Patch,
    Rollout,
    RolloutGroup,
    RunTask,
    Sandbox,
    Session,
    SessionToken,
    Task,
    Turn,
)
from ratchet.store.schema.runs import (
    Batch,
    BatchItem,
    Checkpoint,
    Engine,
    Evaluation,
    Installation,
    Learner,
    Metric,
    PolicyVersion,
    Run,
)

__all__ = [
    "GROUP_READY_SEQ",
    "Admission",
    "Attempt",
    "Base",
    "Batch",
    "BatchItem",
    "Chain",
    "ChainSpan",
    "Checkpoint",
    "Engine",
    "Evaluation",
    "Grade",
    "Installation",
    "Learner",
    "Metric",
    "Patch",
    "PolicyVersion",
    "Rollout",
    "RolloutGroup",
    "Run",
    "RunTask",
    "Sandbox",
    "Session",
    "SessionToken",
    "Task",
    "Turn",
]
