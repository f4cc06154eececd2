"""The base of all tables: column types, and names of constraints, by which migrations refer to them."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, Float, ForeignKey, Identity, LargeBinary, MetaData, Text, func
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
    """Base class of all tables."""

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


def identity() -> Mapped[int]:
    """Return a bigint primary key that Postgres generates."""
    return mapped_column(BigInteger, Identity(), primary_key=True)


def now() -> Mapped[datetime]:
    """Return a timestamp column with Postgres `now()` as default."""
    return mapped_column(server_default=func.now())


def reference(column: str, **kwargs: Any) -> Mapped[Any]:
    """Return a bigint foreign key."""
    return mapped_column(BigInteger, ForeignKey(column), **kwargs)
