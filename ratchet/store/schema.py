"""The tables: what is true.

Why here: constraints hold the promises (an outcome has a reward exactly when a verdict exists; a group enters one step).
Called by: the files of this folder, one per aggregate, and the alembic migrations.

Token arrays are bytea: little-endian int32 ids, float32 logprobs (`ratchet.store.arrays`). Times are timestamptz by Postgres `now()`.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import UUID as PgUuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own class-level contract)
        str: Text,
        bytes: LargeBinary,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        float: Float(53),
        UUID: PgUuid,
    }


def _id() -> Mapped[int]:
    return mapped_column(BigInteger, Identity(), primary_key=True)


def _now() -> Mapped[datetime]:
    return mapped_column(server_default=func.now())


def _ref(column: str, **kwargs: Any) -> Mapped[Any]:
    return mapped_column(BigInteger, ForeignKey(column), **kwargs)


class Installation(Base):
    """One row: who we are towards sandbox providers, so that a sweep touches no box of others, and how long no adapter was there."""

    __tablename__ = "installation"
    singleton: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    uuid: Mapped[UUID] = mapped_column(server_default=text("gen_random_uuid()"))
    adapter_seen_at: Mapped[datetime] = _now()
    adapter_away_seconds: Mapped[float] = mapped_column(server_default="0")
    __table_args__ = (CheckConstraint("singleton", name="one_row"),)


class Run(Base):
    """A training or evaluation run. `epoch` fences learners; `checkpoint_step` and `checkpoint_uri` are the checkpoint pointer."""

    __tablename__ = "run"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(server_default="running")
    state_reason: Mapped[str] = mapped_column(server_default="")
    wish: Mapped[str] = mapped_column(server_default="none")
    wish_update_id: Mapped[str | None]
    config: Mapped[dict[str, Any]]
    config_digest: Mapped[str]
    config_name: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    model_path: Mapped[str]
    init_from: Mapped[str | None]
    epoch: Mapped[int] = mapped_column(server_default="0")
    step: Mapped[int] = mapped_column(server_default="0")
    checkpoint_step: Mapped[int] = mapped_column(server_default="0")
    checkpoint_uri: Mapped[str | None]
    next_group_no: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = _now()
    ended_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_run_config_digest", "config_digest"),)


class Task(Base):
    """One row of a dataset, immutable; re-importing the same file adds nothing."""

    __tablename__ = "task"
    id: Mapped[int] = _id()
    dataset: Mapped[str]
    dataset_digest: Mapped[str]
    row_digest: Mapped[str]
    row_no: Mapped[int]
    label: Mapped[str]
    image: Mapped[str]
    workdir: Mapped[str]
    grader: Mapped[str]
    spec: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = _now()
    __table_args__ = (UniqueConstraint("dataset_digest", "row_digest"), Index("ix_task_dataset_digest_row_no", "dataset_digest", "row_no"))


class RunTask(Base):
    """The tasks of a run in the order in which its seed visits them, per purpose."""

    __tablename__ = "run_task"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    purpose: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[int] = _ref("task.id")


class RolloutGroup(Base):
    """`started_step`: the newest published step when it began. `ready_seq` orders ready groups for the planner."""

    __tablename__ = "rollout_group"
    id: Mapped[int] = _id()
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"))
    group_no: Mapped[int]
    task_id: Mapped[int] = _ref("task.id")
    purpose: Mapped[str]
    label: Mapped[str] = mapped_column(server_default="")
    state: Mapped[str] = mapped_column(server_default="open")
    size: Mapped[int]
    min_graded: Mapped[int]
    temperature: Mapped[float]
    started_step: Mapped[int] = mapped_column(server_default="0")
    num_replacements: Mapped[int] = mapped_column(server_default="0")
    ready_seq: Mapped[int | None] = mapped_column(BigInteger)
    workflow_id: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = _now()
    ready_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("run_id", "group_no"),
        Index("ix_rollout_group_run_id_state", "run_id", "purpose", "state", "ready_seq"),
    )


GROUP_READY_SEQ = Sequence("group_ready_seq", metadata=Base.metadata)


class Rollout(Base):
    """One try of one agent at one task. `owner` is the Temporal run id that claimed it; `late`: ended after its group left `open`."""

    __tablename__ = "rollout"
    id: Mapped[int] = _id()
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"))
    group_id: Mapped[int | None] = _ref("rollout_group.id")
    task_id: Mapped[int] = _ref("task.id")
    member: Mapped[int]
    purpose: Mapped[str]
    workflow_id: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str | None]
    attempt: Mapped[int] = mapped_column(server_default="0")
    harness: Mapped[str]
    temperature: Mapped[float]
    policy_version: Mapped[str | None]
    outcome: Mapped[str | None]
    outcome_reason: Mapped[str] = mapped_column(server_default="")
    reward: Mapped[float | None]
    reward_components: Mapped[dict[str, Any] | None]
    agent_exit: Mapped[str | None]
    grade_id: Mapped[int | None] = mapped_column(BigInteger)
    num_turns: Mapped[int] = mapped_column(server_default="0")
    num_chains: Mapped[int] = mapped_column(server_default="0")
    num_trained_tokens: Mapped[int] = mapped_column(server_default="0")
    late: Mapped[bool] = mapped_column(server_default=text("false"))
    replaced_by: Mapped[int | None] = mapped_column(BigInteger)
    provenance: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    timings: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    created_at: Mapped[datetime] = _now()
    claimed_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("run_id", "group_id", "member"),
        CheckConstraint("(outcome IS NOT NULL AND outcome IN ('graded','rejected')) = (reward IS NOT NULL)", name="reward_needs_a_verdict"),
        CheckConstraint("reward IS NULL OR (reward = reward AND abs(reward) < 'infinity'::float8)", name="reward_finite"),
        CheckConstraint(
            "outcome IS NULL OR outcome IN ('graded','rejected','infra_failed','grader_failed','cancelled')", name="outcome_known"
        ),
        Index("ix_rollout_group_id", "group_id"),
        Index("ix_rollout_open", "run_id", postgresql_where=text("outcome IS NULL")),
    )


class Attempt(Base):
    """The n-th agent box of a rollout. Each try of a stage takes `fence + 1`, and all its writes carry it."""

    __tablename__ = "attempt"
    id: Mapped[int] = _id()
    rollout_id: Mapped[int] = _ref("rollout.id")
    n: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="open")
    fence: Mapped[int] = mapped_column(server_default="0")
    sandbox_id: Mapped[int | None] = mapped_column(BigInteger)
    agent_exit: Mapped[str | None]
    used_seconds: Mapped[float] = mapped_column(server_default="0")
    base_commit: Mapped[str | None]
    workspace_log: Mapped[bytes | None]
    transcript: Mapped[bytes | None]
    harness_version: Mapped[str | None]
    created_at: Mapped[datetime] = _now()
    __table_args__ = (UniqueConstraint("rollout_id", "n"),)


class Session(Base):
    """The adapter's view of one attempt. All its tokens are valid until it is closed."""

    __tablename__ = "session"
    id: Mapped[int] = _id()
    rollout_id: Mapped[int] = _ref("rollout.id")
    attempt: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="open")
    temperature: Mapped[float]
    model: Mapped[str]
    limits: Mapped[dict[str, Any]]
    engine_wait_seconds: Mapped[float] = mapped_column(server_default="0")
    away_before: Mapped[float | None]
    created_at: Mapped[datetime] = _now()
    closed_at: Mapped[datetime | None]
    __table_args__ = (UniqueConstraint("rollout_id", "attempt"),)


class SessionToken(Base):
    """sha256 of a bearer token of 256 random bits; the token itself is stored nowhere."""

    __tablename__ = "session_token"
    token_hash: Mapped[bytes] = mapped_column(primary_key=True)
    session_id: Mapped[int] = _ref("session.id", index=True)
    created_at: Mapped[datetime] = _now()


class Turn(Base):
    """One model call.

    prompt = parent stream[:kept_tokens] ++ suffix_ids, stream = prompt ++ sampled_ids; a root has kept_tokens 0.
    `version_spans`: [{"version", "start", "end"}] over the sampled ids, end exclusive. `delivered`: the answer's last byte was written.
    """

    __tablename__ = "turn"
    id: Mapped[int] = _id()
    session_id: Mapped[int] = _ref("session.id")
    rollout_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    lane: Mapped[str] = mapped_column(server_default="")
    digest: Mapped[bytes]
    ordinal: Mapped[int] = mapped_column(server_default="0")
    state: Mapped[str] = mapped_column(server_default="in_flight")
    kind: Mapped[str] = mapped_column(server_default="main")
    parent_turn_id: Mapped[int | None] = mapped_column(BigInteger)
    kept_tokens: Mapped[int] = mapped_column(server_default="0")
    fork_cause: Mapped[str | None]
    dialect: Mapped[str]
    prompt_tokens: Mapped[int]
    suffix_ids: Mapped[bytes]
    sampled_ids: Mapped[bytes | None]
    logprobs: Mapped[bytes | None]
    num_sampled: Mapped[int] = mapped_column(server_default="0")
    logprobs_valid: Mapped[bool] = mapped_column(server_default=text("true"))
    version_spans: Mapped[list[Any] | None]
    finish_reason: Mapped[str | None]
    temperature: Mapped[float]
    request: Mapped[bytes]
    answer: Mapped[bytes | None]
    engine_id: Mapped[int | None] = mapped_column(BigInteger)
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    delivered: Mapped[bool] = mapped_column(server_default=text("false"))
    engine_wait_seconds: Mapped[float] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = _now()
    completed_at: Mapped[datetime | None]
    __table_args__ = (UniqueConstraint("session_id", "lane", "digest", "ordinal"), Index("ix_turn_rollout_id", "rollout_id"))


class Sandbox(Base):
    """Ledger of boxes, written before the box exists. `used_by` marks a box as spent by its first use. No rollout: an admission's box."""

    __tablename__ = "sandbox"
    id: Mapped[int] = _id()
    uuid: Mapped[UUID] = mapped_column(server_default=text("gen_random_uuid()"), unique=True)
    provider: Mapped[str]
    provider_id: Mapped[str | None]
    role: Mapped[str]
    rollout_id: Mapped[int | None] = _ref("rollout.id", index=True)
    attempt: Mapped[int]
    workflow_id: Mapped[str]
    image: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="creating")
    used_by: Mapped[str | None]
    release_reason: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = _now()
    live_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_sandbox_not_released", "provider", "state", postgresql_where=text("state <> 'released'")),)


class Patch(Base):
    """The agent's diff against the recorded base commit, zstd. One per attempt. `reason`: why it was left out, if it was."""

    __tablename__ = "patch"
    id: Mapped[int] = _id()
    rollout_id: Mapped[int] = _ref("rollout.id", index=True)
    attempt: Mapped[int]
    base_commit: Mapped[str]
    diff: Mapped[bytes]
    num_bytes: Mapped[int]
    num_files: Mapped[int]
    reason: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = _now()
    __table_args__ = (UniqueConstraint("rollout_id", "attempt"),)


class Grade(Base):
    """A verdict on a patch by one grader version. Many per rollout; the rollout names the one its reward came from.

    `tests`: name → outcome. `fail_to_pass`, `pass_to_pass`: [passed, expected]. `findings`: [{"rule", "path", "action"}], files that an
    integrity rule kept out; `rule`: the one that decided a `rejected`. `repeat` counts grades of one patch by one grader version.
    """

    __tablename__ = "grade"
    id: Mapped[int] = _id()
    rollout_id: Mapped[int] = _ref("rollout.id", index=True)
    patch_id: Mapped[int] = _ref("patch.id")
    grader: Mapped[str]
    grader_version: Mapped[str]
    solved: Mapped[bool]
    rejected: Mapped[bool] = mapped_column(server_default=text("false"))
    rule: Mapped[str] = mapped_column(server_default="")
    reason: Mapped[str] = mapped_column(server_default="")
    tests: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    fail_to_pass: Mapped[list[Any] | None]
    pass_to_pass: Mapped[list[Any] | None]
    findings: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    repeat: Mapped[int] = mapped_column(server_default="0")
    log: Mapped[bytes]
    duration_seconds: Mapped[float]
    sandbox_id: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = _now()


class Admission(Base):
    """Whether a task may be trained and evaluated on, by one grader version: its gold patch passed and the empty one failed, every time.

    `evidence`: [{"patch": "gold" or "empty", "solved", "reason", "seconds", "tests"}], one per repeat.
    """

    __tablename__ = "admission"
    id: Mapped[int] = _id()
    task_id: Mapped[int] = _ref("task.id")
    grader: Mapped[str]
    grader_version: Mapped[str]
    admitted: Mapped[bool]
    reason: Mapped[str] = mapped_column(server_default="")
    evidence: Mapped[list[Any]]
    gold_seconds: Mapped[float | None]
    created_at: Mapped[datetime] = _now()
    __table_args__ = (UniqueConstraint("task_id", "grader", "grader_version"),)


class Chain(Base):
    """One root-to-leaf path of a rollout's turn tree, derived at finalise from the last attempt's session."""

    __tablename__ = "chain"
    id: Mapped[int] = _id()
    rollout_id: Mapped[int] = _ref("rollout.id")
    no: Mapped[int]
    leaf_turn_id: Mapped[int] = mapped_column(BigInteger)
    num_tokens: Mapped[int]
    num_trained: Mapped[int]
    __table_args__ = (UniqueConstraint("rollout_id", "no"),)


class ChainSpan(Base):
    """Tokens [start, start + length) of a chain, taken from a turn.

    `sampled` false: from `suffix_ids[source_start:]`; true: from `sampled_ids[source_start:]`. `trained`: these tokens get loss
    weight in this chain, and in no other chain of the rollout.
    """

    __tablename__ = "chain_span"
    chain_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("chain.id", ondelete="CASCADE"), primary_key=True)
    no: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[int] = mapped_column(BigInteger)
    sampled: Mapped[bool]
    trained: Mapped[bool]
    start: Mapped[int]
    length: Mapped[int]
    source_start: Mapped[int]


class Batch(Base):
    """A plan row: everything that fixes one step, so that a replay does the same again.

    `members`: list of {"rollout_id", "group_id", "grade_id", "reward", "advantage", "num_tokens", "update"}, in order.
    `denominators`: one number per update for the run's reducer. `epoch` and `metrics` are written by the learner.
    """

    __tablename__ = "batch"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(server_default="planned")
    members: Mapped[list[Any]]
    denominators: Mapped[list[Any]]
    knobs: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(BigInteger)
    epoch: Mapped[int | None]
    metrics: Mapped[dict[str, Any] | None]
    planned_at: Mapped[datetime] = _now()
    stepped_at: Mapped[datetime | None]
    committed_at: Mapped[datetime | None]


class BatchItem(Base):
    """A group enters at most one step, by constraint. `use`: trained, or consumed without being trained on (`no_signal`, `expired`)."""

    __tablename__ = "batch_item"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("rollout_group.id"), primary_key=True)
    step: Mapped[int]
    use: Mapped[str]
    __table_args__ = (Index("ix_batch_item_run_id_step", "run_id", "step"),)


class Checkpoint(Base):
    """A complete DCP checkpoint. The run's pointer and this row are written in the transaction that commits its batches."""

    __tablename__ = "checkpoint"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    uri: Mapped[str]
    world_size: Mapped[int]
    num_threads: Mapped[int]
    created_at: Mapped[datetime] = _now()


class PolicyVersion(Base):
    """Published weights: a complete model directory, fsynced before this row. `files`: [{"name", "sha256", "bytes"}]."""

    __tablename__ = "policy_version"
    version: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), index=True)
    step: Mapped[int]
    epoch: Mapped[int]
    uri: Mapped[str]
    files: Mapped[list[Any]]
    state: Mapped[str] = mapped_column(server_default="published")
    canary: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = _now()


class Engine(Base):
    """One vLLM server. `version`: the weights it serves now; `heartbeat_at` is written by its wrapper."""

    __tablename__ = "engine"
    id: Mapped[int] = _id()
    address: Mapped[str] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(server_default="starting")
    version: Mapped[str | None]
    model_path: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    paused_until: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime] = _now()
    created_at: Mapped[datetime] = _now()


class Learner(Base):
    """One row per run: what the learner does now, for `learn.step` to watch."""

    __tablename__ = "learner"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    epoch: Mapped[int]
    world_size: Mapped[int]
    phase: Mapped[str]
    step: Mapped[int] = mapped_column(server_default="0")
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    heartbeat_at: Mapped[datetime] = _now()


class Evaluation(Base):
    """One evaluation of one policy version at one temperature; its rollouts carry the label through their groups."""

    __tablename__ = "evaluation"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int]
    temperature: Mapped[float]
    num_samples: Mapped[int]
    policy_version: Mapped[str]
    created_at: Mapped[datetime] = _now()
    ended_at: Mapped[datetime | None]


class Metric(Base):
    """One number of one step; `name` as in training.md 1.5."""

    __tablename__ = "metric"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
