"""Tables of tasks: their rows, what their images are built from, and what admission has found about them."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.schema.base import Base, identity, now, reference


class TaskTable(Base):
    """One row of a dataset, immutable; importing the same file again adds no row.

    `created_at`: the import, of a row that was read in another way in between the last one.
    """

    __tablename__ = "task"
    id: Mapped[int] = identity()
    dataset: Mapped[str]
    dataset_digest: Mapped[str]
    row_digest: Mapped[str]
    row_no: Mapped[int]
    label: Mapped[str]
    image: Mapped[str]
    workdir: Mapped[str]
    grader: Mapped[str]
    spec: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = now()
    __table_args__ = (
        UniqueConstraint("dataset_digest", "row_digest"),
        Index("ix_task_dataset_digest_row_no", "dataset_digest", "row_no"),
    )


class BuildContextTable(Base):
    """The input of an image build: a tar.gz with a Dockerfile. The image's name is the archive's digest, so many tasks
    may share one row."""

    __tablename__ = "build_context"
    image: Mapped[str] = mapped_column(primary_key=True)
    archive: Mapped[bytes]
    created_at: Mapped[datetime] = now()


class AdmissionTable(Base):
    """One grader version's admission of a task: admitted if its gold patch always passed and the empty one never did.

    `evidence`: one `TrialResult` (`ratchet/grading_payloads.py`) per trial. `oracle`: what the gold runs have in common
    (`grading/oracle.py`); NULL if there is none.
    """

    __tablename__ = "admission"
    id: Mapped[int] = identity()
    task_id: Mapped[int] = reference("task.id")
    grader: Mapped[str]
    grader_version: Mapped[str]
    admitted: Mapped[bool]
    reason: Mapped[str] = mapped_column(server_default="")
    evidence: Mapped[list[Any]]
    oracle: Mapped[dict[str, Any] | None]
    gold_seconds: Mapped[float | None]
    created_at: Mapped[datetime] = now()
    __table_args__ = (UniqueConstraint("task_id", "grader", "grader_version"),)


class TrialTable(Base):
    """The gold run of one trial, kept until the admission's oracle is made of all of them."""

    __tablename__ = "trial"
    task_id: Mapped[int] = reference("task.id", primary_key=True)
    grader: Mapped[str] = mapped_column(primary_key=True)
    grader_version: Mapped[str] = mapped_column(primary_key=True)
    repeat: Mapped[int] = mapped_column(primary_key=True)
    oracle: Mapped[dict[str, Any]]


class BrokenOracleTable(Base):
    """One of a task's broken oracles (`grading/broken_oracles.py`). `number` counts the tries to make one,
    so that numbers may be missing."""

    __tablename__ = "broken_oracle"
    task_id: Mapped[int] = reference("task.id", primary_key=True)
    grader: Mapped[str] = mapped_column(primary_key=True)
    grader_version: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[dict[str, Any]]
