"""The tables. Import them from here.

Constraints enforce the main promises: a rollout has a reward exactly if it has a verdict, and a group enters one step.
Token arrays are bytea: little-endian int32 ids, float32 logprobs (`store.arrays`). Times are timestamptz, set
by Postgres `now()`. States are text columns with the values of `ratchet.types`."""

from store.schema.base import Base
from store.schema.rollouts import (
    GROUP_READY_SEQ,
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
    TrainedTurnTable,
    TurnTable,
)
from store.schema.runs import (
    AdapterProcessTable,
    BatchItemTable,
    BatchTable,
    CheckpointTable,
    EngineLoadTable,
    EngineTable,
    EvaluationTable,
    InstallationTable,
    LearnerTable,
    MetricTable,
    OutageTable,
    PolicyVersionTable,
    RunTable,
    SteeringTable,
    StepTokenTable,
)
from store.schema.search import RolloutWordsTable
from store.schema.tasks import AdmissionTable, BrokenOracleTable, BuildContextTable, TaskTable, TrialTable

__all__ = [
    "GROUP_READY_SEQ",
    "AdapterProcessTable",
    "AdmissionTable",
    "AttemptTable",
    "Base",
    "BatchItemTable",
    "BatchTable",
    "BrokenOracleTable",
    "BuildContextTable",
    "ChainSpanTable",
    "ChainTable",
    "CheckpointTable",
    "EngineLoadTable",
    "EngineTable",
    "EvaluationTable",
    "GradeTable",
    "InstallationTable",
    "LearnerTable",
    "MetricTable",
    "OutageTable",
    "PatchTable",
    "PolicyVersionTable",
    "RolloutGroupTable",
    "RolloutTable",
    "RolloutWordsTable",
    "RunTable",
    "RunTaskTable",
    "SandboxTable",
    "SessionTable",
    "SessionTokenTable",
    "SteeringTable",
    "StepTokenTable",
    "TaskTable",
    "TrainedTurnTable",
    "TrialTable",
    "TurnTable",
]
