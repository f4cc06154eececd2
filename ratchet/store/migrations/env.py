"""Alembic's entry: run the migrations over asyncpg, in one process at a time."""

import asyncio

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine

from ratchet.store.schema import Base

_LOCK = 7265742  # any constant: the key of the advisory lock that orders concurrent starts


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
    with context.begin_transaction():
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        # Statements of a running stack queue behind a migration that waits for a table's lock.
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        context.run_migrations()


async def _main(url: str) -> None:
    engine = create_async_engine(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_main(context.config.attributes["url"]))
