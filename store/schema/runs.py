"""Tables of runs: installation, plan rows, checkpoints, policy versions, engines, learners, evaluations, metrics."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Integer, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from ratchet.config_engines import DEFAULT_SET
from store.schema.base import Base, identity, now


class InstallationTable(Base):
    """One row. `uuid` marks this installation's boxes, so that a sweep spares those of others. `namespace_id`: of the
    Temporal namespace that has its workflows, NULL before the first `ratchet up`. `place`, `moved_from` and
    `copied_from`: see `store.installations`.

    `adapter_seen_at` and `adapter_away_seconds`: see `store.adapters`.
    """

    __tablename__ = "installation"
    singleton: Mapped[bool] = mapped_column(primary_key=True, server_default=text("true"))
    uuid: Mapped[UUID] = mapped_column(server_default=text("gen_random_uuid()"))
    namespace_id: Mapped[str | None]
    place: Mapped[str | None]
    moved_from: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    copied_from: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    adapter_seen_at: Mapped[datetime] = now()
    adapter_away_seconds: Mapped[float] = mapped_column(server_default="0")
    __table_args__ = (CheckConstraint("singleton", name="one_row"),)


class AdapterProcessTable(Base):
    """The lease of an adapter process: after `alive_until`, another process may take its calls over."""

    __tablename__ = "adapter_process"
    id: Mapped[str] = mapped_column(primary_key=True)
    alive_until: Mapped[datetime]


class OutageTable(Base):
    """A time in which a part of the stack did not answer, as the watcher found it (`stack/outage_log.py`). While it
    lasts, `ended_at` moves on."""

    __tablename__ = "outage"
    part: Mapped[str] = mapped_column(primary_key=True)
    began_at: Mapped[datetime] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime] = mapped_column(index=True)


class RunTable(Base):
    """A run. `epoch` fences learners; `checkpoint_step` and `checkpoint_uri` are the checkpoint pointer.

    `engine_set`: the engines that answer its rollouts and load its weights. `lora_slot`: the slot of these engines
    that serves its weights; each is that of one open run of the set at most (`store.open_runs`).
    `patient_from`: first group made after the run was last resumed; earlier groups without signal do not pause it
    again. `source_run_id`: the run whose stored groups this one trains on; such a run has no rollouts, workflow or
    engine. `restarts`: how often the sweep has started its workflow again without an hour between.

    `wish` and `stop_at`: how a person wants the run to end, and the step after which it does, if it is not the config's
    last (`store.steering`). `best_step` and `best_rate`: step and mean reward of the best evaluation, whose weights are
    kept (`store.evaluations`). `box_cap`, `box_cap_cause`, `box_cap_at`: the adaptive limit of boxes, why, and since
    when (`store.box_cap`). `pruned_at`, `archived_to`, `archived_at`: see `store.retention`."""

    __tablename__ = "run"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(server_default="running")
    state_reason: Mapped[str] = mapped_column(server_default="")
    wish: Mapped[str] = mapped_column(server_default="none")
    stop_at: Mapped[int | None]
    box_cap: Mapped[int | None]
    box_cap_cause: Mapped[str | None]
    box_cap_at: Mapped[datetime | None]
    best_step: Mapped[int | None]
    best_rate: Mapped[float | None]
    config: Mapped[dict[str, Any]]
    config_digest: Mapped[str]
    config_name: Mapped[str]
    seed: Mapped[int] = mapped_column(BigInteger)
    model_path: Mapped[str]
    init_from: Mapped[str | None]
    source_run_id: Mapped[str | None] = mapped_column(ForeignKey("run.run_id"))
    engine_set: Mapped[str] = mapped_column(server_default=DEFAULT_SET)
    lora_slot: Mapped[int] = mapped_column(server_default="1")
    epoch: Mapped[int] = mapped_column(server_default="0")
    step: Mapped[int] = mapped_column(server_default="0")
    checkpoint_step: Mapped[int] = mapped_column(server_default="0")
    checkpoint_uri: Mapped[str | None]
    next_group_no: Mapped[int] = mapped_column(server_default="0")
    patient_from: Mapped[int] = mapped_column(server_default="0")
    restarts: Mapped[int] = mapped_column(server_default="0")
    restarted_at: Mapped[datetime | None]
    pruned_at: Mapped[datetime | None]
    archived_to: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    archived_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = now()
    ended_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_run_config_digest", "config_digest"),)


class SteeringTable(Base):
    """A person's request to a run: who, when, from what to what. One row per change, written in the transaction that
    makes the change; never changed.

    `target`: the config key, or the workflow of the group or rollout; empty for the run itself. `request_id`: id of the
    command or update, so that a repeated one changes nothing. `from_step`: the first step planned after the change.
    """

    __tablename__ = "steering"
    id: Mapped[int] = identity()
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"))
    request_id: Mapped[str]
    action: Mapped[str]
    target: Mapped[str] = mapped_column(server_default="")
    before: Mapped[Any] = mapped_column(JSONB)
    after: Mapped[Any] = mapped_column(JSONB)
    asked_by: Mapped[str]
    reason: Mapped[str] = mapped_column(server_default="")
    from_step: Mapped[int]
    asked_at: Mapped[datetime] = now()
    __table_args__ = (UniqueConstraint("run_id", "request_id", "target"),)


class BatchTable(Base):
    """A plan row: the members, weights and settings of one step, so that a replay trains the same.

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
    planned_at: Mapped[datetime] = now()
    stepped_at: Mapped[datetime | None]
    committed_at: Mapped[datetime | None]


class BatchItemTable(Base):
    """The step that consumed a group; at most one, by constraint. `use`: `trained`, `no_signal` or `expired`.
    `rewards`: those of the members then, in their order; a regrade changes only those of the rollouts."""

    __tablename__ = "batch_item"
    run_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("rollout_group.id"), primary_key=True)
    step: Mapped[int]
    use: Mapped[str]
    rewards: Mapped[list[Any]] = mapped_column(server_default="[]")
    __table_args__ = (Index("ix_batch_item_run_id_step", "run_id", "step"), Index("ix_batch_item_group_id", "group_id"))


class CheckpointTable(Base):
    """A complete torch DCP checkpoint, written with the move of the run's pointer and the commit of its batches."""

    __tablename__ = "checkpoint"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    uri: Mapped[str]
    world_size: Mapped[int]
    num_threads: Mapped[int]
    created_at: Mapped[datetime] = now()


class PolicyVersionTable(Base):
    """Published weights: a complete model directory, fsynced before this row. `files`: [{"name", "sha256", "bytes"}],
    with "chain" if a file is stored as a delta at an address (`engine/weight_deltas.py`)."""

    __tablename__ = "policy_version"
    version: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), index=True)
    step: Mapped[int]
    epoch: Mapped[int]
    uri: Mapped[str]
    files: Mapped[list[Any]]
    state: Mapped[str] = mapped_column(server_default="published")
    canary: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime] = now()


class EngineTable(Base):
    """One vLLM server. `version`: the weights it serves, of all its LoRA slots (`ratchet.lora_slots`). Its
    wrapper writes `heartbeat_at`.

    `engine_set`: that of the runs whose weights it loads and whose calls it answers; a row keeps it for ever, so an
    engine of another set at the same address has a row of its own."""

    __tablename__ = "engine"
    id: Mapped[int] = identity()
    address: Mapped[str]
    engine_set: Mapped[str] = mapped_column(server_default=DEFAULT_SET)
    state: Mapped[str] = mapped_column(server_default="starting")
    version: Mapped[str | None]
    model_path: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    paused_until: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime] = now()
    created_at: Mapped[datetime] = now()
    __table_args__ = (UniqueConstraint("address", "engine_set"),)


class EngineLoadTable(Base):
    """An engine has loaded a policy version: at its start, by a sync, or when it caught up."""

    __tablename__ = "engine_load"
    id: Mapped[int] = identity()
    engine_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("engine.id"), index=True)
    version: Mapped[str] = mapped_column(index=True)
    loaded_at: Mapped[datetime] = now()


class LearnerTable(Base):
    """The phase and heartbeat of a run's learner, which `learn.step` watches."""

    __tablename__ = "learner"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    epoch: Mapped[int]
    world_size: Mapped[int]
    phase: Mapped[str]
    step: Mapped[int] = mapped_column(server_default="0")
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    heartbeat_at: Mapped[datetime] = now()


class EvaluationTable(Base):
    """One evaluation of one policy version at one temperature; the groups of its rollouts carry the label."""

    __tablename__ = "evaluation"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int]
    temperature: Mapped[float]
    num_samples: Mapped[int]
    policy_version: Mapped[str]
    created_at: Mapped[datetime] = now()
    ended_at: Mapped[datetime | None]


class MetricTable(Base):
    """One metric of one step."""

    __tablename__ = "metric"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class StepTokenTable(Base):
    """One of the trained tokens of a step whose ratios are furthest from 1; `no` 0 is the furthest.

    `position`: in its chain. `behaviour`: the recorded logprob. `logprob` and `entropy`, in nats: of the learner before
    the update that trained the token. `masked`: the loss gave it no gradient. A replay of the step overwrites its rows.
    """

    __tablename__ = "step_token"
    run_id: Mapped[str] = mapped_column(ForeignKey("run.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True)
    no: Mapped[int] = mapped_column(Integer, primary_key=True)
    rollout_id: Mapped[int] = mapped_column(BigInteger)
    turn_id: Mapped[int] = mapped_column(BigInteger)
    position: Mapped[int] = mapped_column(Integer)
    token_id: Mapped[int] = mapped_column(Integer)
    behaviour: Mapped[float]
    logprob: Mapped[float]
    entropy: Mapped[float]
    masked: Mapped[bool]
