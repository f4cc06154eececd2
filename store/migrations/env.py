"""Alembic's entry: run the migrations over asyncpg, in one process at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, NullPool, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from store.schema import Base

_LOCK = 7265742  # any constant: the key of the advisory lock that orders concurrent starts
_LOOK_SECONDS = 0.2


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection, target_metadata=Base.metadata, compare_type=True, transaction_per_migration=True
    )
    with context.begin_transaction():
        context.run_migrations()


async def _hold_lock(connection: AsyncConnection) -> None:
    """Take the lock that this connection then holds until it is closed.

    It outlives the transactions of the migrations. It is asked for again and again, because a statement that waits for
    it would hold a snapshot, for whose end CREATE INDEX CONCURRENTLY waits.
    """
    while not (await connection.execute(text(f"SELECT pg_try_advisory_lock({_LOCK})"))).scalar_one():
        await connection.rollback()
        await asyncio.sleep(_LOOK_SECONDS)
    # Statements of a running stack queue behind a migration that waits for a table's lock.
    await connection.execute(text("SET lock_timeout = '5s'"))
    await connection.execute(text("SET statement_timeout = 0"))  # one of the database may be shorter than a migration
    await connection.commit()


async def _main(url: str) -> None:
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            await _hold_lock(connection)
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_main(context.config.attributes["url"]))
