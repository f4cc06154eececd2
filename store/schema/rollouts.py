"""Tables of groups and rollouts, with their attempts, sessions, turns, boxes, patches, grades and chains."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Sequence, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import TSTZMULTIRANGE, TSVECTOR
from sqlalchemy.orm import Mapped, mapped_column

from store.schema.base import Base, identity, now, reference


class RunTaskTable(Base):
    """A run's tasks by purpose, in the order of its seed. `dataset_no`: which of the config's datasets, from 0."""

    __tablename__ = "run_task"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    purpose: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[int] = reference("task.id")
    dataset_no: Mapped[int]


class RolloutGroupTable(Base):
    """A group. `started_step`: newest published step when it was made. `ready_seq`: order for the planner.
    `forked_turn_id`: the turn of another rollout before which its members begin (`store.forks`), NULL for most."""

    __tablename__ = "rollout_group"
    id: Mapped[int] = identity()
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"))
    group_no: Mapped[int]
    task_id: Mapped[int] = reference("task.id")
    purpose: Mapped[str]
    label: Mapped[str] = mapped_column(server_default="")
    state: Mapped[str] = mapped_column(server_default="open")
    size: Mapped[int]
    min_graded: Mapped[int]
    temperature: Mapped[float]
    started_step: Mapped[int] = mapped_column(server_default="0")
    num_replacements: Mapped[int] = mapped_column(server_default="0")
    ready_seq: Mapped[int | None] = mapped_column(BigInteger)
    forked_turn_id: Mapped[int | None] = mapped_column(BigInteger)
    workflow_id: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = now()
    ready_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("run_id", "group_no"),
        Index("ix_rollout_group_run_id_state", "run_id", "purpose", "state", "ready_seq"),
        Index("ix_rollout_group_task_id", "task_id"),
        Index("ix_rollout_group_forked_turn_id", "forked_turn_id", postgresql_where=text("forked_turn_id IS NOT NULL")),
    )


GROUP_READY_SEQ = Sequence("group_ready_seq", metadata=Base.metadata)


class RolloutTable(Base):
    """One try of one agent at one task. `owner`: Temporal run id that claimed it. `late`: ended after its group did.

    `has_words`: the sweep has indexed its conversation for the search (`store.rollout_words`)."""

    __tablename__ = "rollout"
    id: Mapped[int] = identity()
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"))
    group_id: Mapped[int | None] = reference("rollout_group.id")
    task_id: Mapped[int] = reference("task.id")
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
    created_at: Mapped[datetime] = now()
    claimed_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    has_words: Mapped[bool] = mapped_column(server_default=text("false"))
    __table_args__ = (
        UniqueConstraint("run_id", "group_id", "member"),
        CheckConstraint(
            "(outcome IS NOT NULL AND outcome IN ('graded','rejected')) = (reward IS NOT NULL)",
            name="reward_needs_a_verdict",
        ),
        CheckConstraint(
            "reward IS NULL OR (reward = reward AND abs(reward) < 'infinity'::float8)", name="reward_finite"
        ),
        CheckConstraint(
            "outcome IS NULL OR outcome IN ('graded','rejected','infra_failed','grader_failed','cancelled')",
            name="outcome_known",
        ),
        Index("ix_rollout_group_id", "group_id"),
        Index("ix_rollout_task_id", "task_id"),
        Index("ix_rollout_open", "run_id", postgresql_where=text("outcome IS NULL")),
        Index("ix_rollout_run_id_id", "run_id", "id"),
        Index("ix_rollout_verdicts", "run_id", "purpose", "outcome", "agent_exit", "reward"),
        Index("ix_rollout_without_words", "run_id", "id", postgresql_where=text("NOT has_words")),
    )


class AttemptTable(Base):
    """The n-th agent box of a rollout. Each try of a stage increments `fence`, and its writes carry that value."""

    __tablename__ = "attempt"
    id: Mapped[int] = identity()
    rollout_id: Mapped[int] = reference("rollout.id")
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
    created_at: Mapped[datetime] = now()
    __table_args__ = (UniqueConstraint("rollout_id", "n"),)


class SessionTable(Base):
    """The adapter's session for one attempt. All its tokens are valid until it is closed.

    `limits`: `store.sessions.SessionLimits`. `away_before`: the adapters' away seconds at the first token. `endpoint`:
    the server that answers instead of the policy (`EndpointConfig`), NULL: the policy. `endpoint_error`: why it did not
    answer the last call, NULL if it did. `refusal`: why a call was first refused for what it contained, which leaves no
    turn; NULL if none was. `engine_waits`: when calls waited for an engine, or for more than five seconds for the store
    or a message in a replay, or the agent was suspended at its deadline, in all `engine_wait_seconds`.
    """

    __tablename__ = "session"
    id: Mapped[int] = identity()
    rollout_id: Mapped[int] = reference("rollout.id")
    attempt: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="open")
    temperature: Mapped[float]
    model: Mapped[str]
    limits: Mapped[dict[str, Any]]
    engine_wait_seconds: Mapped[float] = mapped_column(server_default="0")
    away_before: Mapped[float | None]
    endpoint: Mapped[dict[str, Any] | None]
    endpoint_error: Mapped[str | None]
    refusal: Mapped[str | None]
    engine_waits: Mapped[Any] = mapped_column(TSTZMULTIRANGE, server_default="{}")
    created_at: Mapped[datetime] = now()
    closed_at: Mapped[datetime | None]
    __table_args__ = (UniqueConstraint("rollout_id", "attempt"),)


class SessionTokenTable(Base):
    """The sha256 of a bearer token of 256 random bits; the token itself is not stored."""

    __tablename__ = "session_token"
    token_hash: Mapped[bytes] = mapped_column(primary_key=True)
    session_id: Mapped[int] = reference("session.id", index=True)
    created_at: Mapped[datetime] = now()


class TurnTable(Base):
    """One model call.

    prompt = parent stream[:kept_tokens] ++ suffix_ids, stream = prompt ++ sampled_ids; a root has kept_tokens 0.
    `version_spans`: [{"version", "start", "end"}] over the sampled ids, end exclusive. `routed_experts`: the experts of
    the stream's tokens from the last kept one on, without the last sampled one (`ratchet.routed_experts`); NULL if the
    engine returned none, or once no step can need them. `unread_call`: an `UnreadCause`. `delivered`: the answer's last
    byte was written. `worker` and `lease_owner`: see `store.turns`. `replayed_at`: when a later attempt asked for it
    again, and it moved to that attempt's session (`adapter/turns/replay.py`)."""

    __tablename__ = "turn"
    id: Mapped[int] = identity()
    session_id: Mapped[int] = reference("session.id")
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
    routed_experts: Mapped[bytes | None]
    version_spans: Mapped[list[Any] | None]
    finish_reason: Mapped[str | None]
    unread_call: Mapped[str | None]
    temperature: Mapped[float]
    request: Mapped[bytes]
    answer: Mapped[bytes | None]
    engine_id: Mapped[int | None] = mapped_column(BigInteger)
    lease_owner: Mapped[str | None]
    worker: Mapped[str]
    delivered: Mapped[bool] = mapped_column(server_default=text("false"))
    engine_wait_seconds: Mapped[float] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = now()
    completed_at: Mapped[datetime | None]
    replayed_at: Mapped[datetime | None]
    __table_args__ = (
        UniqueConstraint("session_id", "lane", "digest", "ordinal"),
        Index("ix_turn_rollout_id", "rollout_id"),
        Index("ix_turn_with_experts", "rollout_id", postgresql_where=text("routed_experts IS NOT NULL")),
    )


class SandboxTable(Base):
    """The ledger of boxes, written before the box exists.

    `used_by`: the try that used the box. `rollout_id` NULL: a box of an admission. `boot_error`: why the newest try to
    create the box failed, empty if the service had no room; NULL during the first try and when the box is live.
    `released_at`: when its rollout ceased to use it, also if it could not be killed at once.
    """

    __tablename__ = "sandbox"
    id: Mapped[int] = identity()
    uuid: Mapped[UUID] = mapped_column(server_default=text("gen_random_uuid()"), unique=True)
    provider: Mapped[str]
    provider_id: Mapped[str | None]
    role: Mapped[str]
    rollout_id: Mapped[int | None] = reference("rollout.id", index=True)
    attempt: Mapped[int]
    workflow_id: Mapped[str]
    image: Mapped[str]
    state: Mapped[str] = mapped_column(server_default="creating")
    used_by: Mapped[str | None]
    release_reason: Mapped[str] = mapped_column(server_default="")
    boot_error: Mapped[str | None]
    created_at: Mapped[datetime] = now()
    live_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]
    __table_args__ = (
        Index("ix_sandbox_not_released", "provider", "state", postgresql_where=text("state <> 'released'")),
        Index("ix_sandbox_created_at", "created_at", postgresql_using="brin"),
    )


class PatchTable(Base):
    """The agent's diff against the recorded base commit, zstd; one per attempt. `reason`: why the diff was left out."""

    __tablename__ = "patch"
    id: Mapped[int] = identity()
    rollout_id: Mapped[int] = reference("rollout.id", index=True)
    attempt: Mapped[int]
    base_commit: Mapped[str]
    diff: Mapped[bytes]
    num_bytes: Mapped[int]
    num_files: Mapped[int]
    reason: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = now()
    __table_args__ = (UniqueConstraint("rollout_id", "attempt"),)


class GradeTable(Base):
    """A verdict on a patch by one grader version; `rollout.grade_id` names the one that decided the reward.

    `tests`: name → outcome. `fail_to_pass`, `pass_to_pass`: [passed, expected]. `findings`: [{"rule", "path",
    "action"}], files that an integrity rule left out; `rule`: the rule that rejected the patch. `repeat` counts grades
    of one patch by one grader version. `has_oracle`: the run was compared with the task's gold runs. `control`: results
    of the control runs, [{"run", "broken_oracle", "passed", "failed", "seconds"}]; NULL without one. `flags`:
    suspicious code, [{"what", "place"}]. `rewards`: numbers that the tests' script has written, by key."""

    __tablename__ = "grade"
    id: Mapped[int] = identity()
    rollout_id: Mapped[int] = reference("rollout.id", index=True)
    patch_id: Mapped[int] = reference("patch.id", index=True)
    grader: Mapped[str]
    grader_version: Mapped[str]
    solved: Mapped[bool]
    rejected: Mapped[bool] = mapped_column(server_default=text("false"))
    rule: Mapped[str] = mapped_column(server_default="")
    reason: Mapped[str] = mapped_column(server_default="")
    tests: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    fail_to_pass: Mapped[list[Any] | None]
    pass_to_pass: Mapped[list[Any] | None]
    rewards: Mapped[dict[str, Any] | None]
    findings: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    repeat: Mapped[int] = mapped_column(server_default="0")
    has_oracle: Mapped[bool] = mapped_column(server_default=text("false"))
    control: Mapped[list[Any] | None]
    flags: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    log: Mapped[bytes]
    duration_seconds: Mapped[float]
    sandbox_id: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = now()
    __table_args__ = (
        Index("ix_grade_flagged", "rollout_id", postgresql_where=text("jsonb_array_length(flags) > 0 OR rejected")),
    )


class ChainTable(Base):
    """One root-to-leaf path of a rollout's turn tree, derived at finalise from the last attempt's session."""

    __tablename__ = "chain"
    id: Mapped[int] = identity()
    rollout_id: Mapped[int] = reference("rollout.id")
    no: Mapped[int]
    leaf_turn_id: Mapped[int] = mapped_column(BigInteger)
    num_tokens: Mapped[int]
    num_trained: Mapped[int]
    __table_args__ = (UniqueConstraint("rollout_id", "no"),)


class ChainSpanTable(Base):
    """Tokens [start, start + length) of a chain, taken from a turn.

    `sampled` false: from `suffix_ids[source_start:]`; true: from `sampled_ids[source_start:]`. `trained`: these tokens
    get loss weight in this chain, and in no other chain of the rollout."""

    __tablename__ = "chain_span"
    chain_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("chain.id", ondelete="CASCADE"), primary_key=True)
    no: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[int] = mapped_column(BigInteger)
    sampled: Mapped[bool]
    trained: Mapped[bool]
    start: Mapped[int]
    length: Mapped[int]
    source_start: Mapped[int]


class TrainedTurnTable(Base):
    """The learner's record of a turn's trained tokens in a step: `ratchet.token_statistics.TrainedTurn`.

    `start`: chain position of the first one. `entropies`, `log_ratios`: little-endian float16. A replay of the step
    overwrites its rows. `run_id` is the run that trains, which for stored groups is not that of the rollout.
    """

    __tablename__ = "trained_turn"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    turn_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    rollout_id: Mapped[int] = mapped_column(BigInteger, index=True)
    start: Mapped[int]
    entropies: Mapped[bytes]
    log_ratios: Mapped[bytes]


class RolloutWordsTable(Base):
    """The distinct words of an ended rollout's conversation; none if its turns have no words or are archived."""

    __tablename__ = "rollout_words"
    rollout_id: Mapped[int] = reference("rollout.id", primary_key=True)
    words: Mapped[Any] = mapped_column(TSVECTOR)
    __table_args__ = (Index("ix_rollout_words_words", "words", postgresql_using="gin"),)
