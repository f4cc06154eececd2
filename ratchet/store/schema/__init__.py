"""The tables: what is true.

Why here: constraints hold the promises (an outcome has a reward exactly when a verdict exists; a group enters one step).
Called by: the files of this folder, one per aggregate, and the alembic migrations.

Token arrays are bytea: little-endian int32 ids, float32 logprobs (`ratchet.store.arrays`). Times are timestamptz by Postgres `now()`.
"""

from ratchet.store.schema.base import Base
from ratchet.store.schema.rollouts import (
    GROUP_READY_SEQ,
    AdmissionTable,
    AttemptTable,
    ChainSpanTable,
    ChainTable,
    GradeTable,
    PatchTable,
    RolloutGroupTable,
    RolloutTable,
    RunTaskTable,
    SandboxTable,
    SessionTable,
    SessionTokenTable,
    TaskTable,
    TurnTable,
)
from ratchet.store.schema.runs import (
    BatchItemTable,
    BatchTable,
    CheckpointTable,
    EngineTable,
    EvaluationTable,
    InstallationTable,
    LearnerTable,
    MetricTable,
    PolicyVersionTable,
    RunTable,
)

__all__ = [
    "GROUP_READY_SEQ",
    "AdmissionTable",
    "AttemptTable",
    "Base",
    "BatchItemTable",
    "BatchTable",
    "ChainSpanTable",
    "ChainTable",
    "CheckpointTable",
    "EngineTable",
    "EvaluationTable",
    "GradeTable",
    "InstallationTable",
    "LearnerTable",
    "MetricTable",
    "PatchTable",
    "PolicyVersionTable",
    "RolloutGroupTable",
    "RolloutTable",
    "RunTable",
    "RunTaskTable",
    "SandboxTable",
    "SessionTable",
    "SessionTokenTable",
    "TaskTable",
    "TurnTable",
]
