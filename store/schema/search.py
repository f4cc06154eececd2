"""The table of the full-text search."""

from typing import Any

from sqlalchemy import Index
from sqlalchemy.dialects.postgresql import TSVECTOR
from sqlalchemy.orm import Mapped, mapped_column

from store.schema.base import Base, reference


class RolloutWordsTable(Base):
    """The distinct words of an ended rollout's conversation; none if its turns have no words or are archived."""

    __tablename__ = "rollout_words"
    rollout_id: Mapped[int] = reference("rollout.id", primary_key=True)
    words: Mapped[Any] = mapped_column(TSVECTOR)
    __table_args__ = (Index("ix_rollout_words_words", "words", postgresql_using="gin"),)
