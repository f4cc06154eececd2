"""The Dockerfiles of tasks with the files beside them, by the reference of the image that is built from them."""

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.schema import BuildContextTable


async def add_build_contexts(connection: AsyncConnection, archives: Mapping[str, bytes]) -> None:
    """Store archives (tar.gz) by image; one that is known is kept, since the reference is its digest."""
    if archives:
        rows = [{"image": image, "archive": archive} for image, archive in sorted(archives.items())]
        await connection.execute(insert(BuildContextTable).on_conflict_do_nothing(), rows)


async def read_build_context(connection: AsyncConnection, image: str) -> bytes | None:
    """Return the archive (tar.gz) from which the image is built; None if no imported task has it."""
    statement = select(BuildContextTable.archive).where(BuildContextTable.image == image)
    return (await connection.execute(statement)).scalar_one_or_none()
