"""The identity of this installation: the id of its boxes, its database's place and the namespace of its workflows.

A copy of the database has the same row, so the row also names the place of its database. A store that finds itself at
another place is a copy until a person says otherwise; it takes a new id, so that it ends no box of the original.

| row's place | id | former ids | by |
|---|---|---|---|
| none | stays | stay | the first process that asks |
| this one | stays | stay | |
| another | a new one | all become `copied_from` | the first process that asks; `ratchet admin restore` |
| any | that of the original again | all become `moved_from` | `ratchet up --moved` |
| any | a new one, unless it is one already | `copied_from` is forgotten | `ratchet up --copied` |
"""

from dataclasses import dataclass
from uuid import UUID, uuid4

import structlog
from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from store.columns import columns_of
from store.schema import InstallationTable

_LOG = structlog.get_logger()

# `ratchet.place` is set by the embedded server (stack/postgres.py), whose directory may be copied as it is.
_PLACE = text(
    "SELECT concat_ws(' ', (SELECT oid FROM pg_database WHERE datname = current_database()),"
    " current_setting('ratchet.place', true)) AS place,"
    " has_function_privilege('pg_control_system()', 'EXECUTE') AS may_read_cluster"
)
_CLUSTER = text("SELECT system_identifier FROM pg_control_system()")


@dataclass(frozen=True, slots=True)
class Installation:
    """`moved_from`: further ids whose boxes are its own. `copied_from`: ids of originals, whose boxes are not."""

    uuid: UUID
    place: str | None
    moved_from: tuple[str, ...]
    copied_from: tuple[str, ...]
    namespace_id: str | None

    @property
    def is_embedded(self) -> bool:
        """True if the database is on the server of a stack, which says where its directory is."""
        return "/" in (self.place or "")

    @property
    def own_ids(self) -> tuple[str, ...]:
        """The ids whose boxes are this installation's."""
        return (str(self.uuid), *self.moved_from)

    @property
    def copy_warning(self) -> str:
        """One sentence for the person who has to say whether this store is a copy; empty if this is settled."""
        if not self.copied_from:
            return ""
        return (
            f"this database is a copy of that of installation {self.copied_from[0]}, or was moved, restored or "
            f"upgraded: it works as installation {self.uuid}, and ends no box that the other has made. Run "
            "`ratchet up --moved` if the other is gone for good, `ratchet up --copied` if it lives on"
        )


async def installation(connection: AsyncConnection) -> Installation:
    """Return the row, made at first use; it gets a new id if the database is at another place than it says."""
    found = await stored_installation(connection)
    if found is None:
        await connection.execute(insert(InstallationTable).values(singleton=True).on_conflict_do_nothing())
        found = await _row(connection)
    place = await _place(connection)
    if found.place in (place, _without_cluster(place)) or place == _without_cluster(found.place):
        return found
    unchanged = InstallationTable.place.is_not_distinct_from(found.place)
    if found.place is None:
        await connection.execute(update(InstallationTable).where(unchanged).values(place=place))
    else:
        await become_copy(connection, found, place)
    return await _row(connection)


async def _place(connection: AsyncConnection) -> str:
    """Return the place of the database; without the cluster's identifier if this role may not read it."""
    row = (await connection.execute(_PLACE)).one()
    if not row.may_read_cluster:
        return str(row.place)
    return f"{(await connection.execute(_CLUSTER)).scalar_one()} {row.place}"


def _without_cluster(place: str | None) -> str:
    """Return a place as a role sees it that may not read the cluster's identifier."""
    return (place or "").partition(" ")[2]


async def installation_id(connection: AsyncConnection) -> UUID:
    """Return the id that marks new boxes of this installation."""
    return (await installation(connection)).uuid


async def stored_installation(connection: AsyncConnection) -> Installation | None:
    """Return the row as it is stored; None before its first use."""
    row = (await connection.execute(select(*columns_of(Installation, InstallationTable)))).one_or_none()
    if row is None:
        return None
    return Installation(row.uuid, row.place, tuple(row.moved_from), tuple(row.copied_from), row.namespace_id)


async def become_copy(connection: AsyncConnection, known: Installation, place: str | None) -> None:
    """Take a new id, as long as nothing else has changed the row since `known` was read."""
    values = {"uuid": uuid4(), "place": place, "moved_from": [], "copied_from": [*known.own_ids, *known.copied_from]}
    changing = update(InstallationTable).where(InstallationTable.uuid == known.uuid)
    if (await connection.execute(changing.values(**values))).rowcount == 1:
        _LOG.warning((await _row(connection)).copy_warning)


async def settle_restored(connection: AsyncConnection, moved: bool) -> None:
    """Give a restored row its new place: as the same installation if it was `moved`, else as a copy."""
    known = await stored_installation(connection)
    if known is not None and not moved:
        await become_copy(connection, known, None)
    await connection.execute(update(InstallationTable).values(place=None))


async def forget_original(connection: AsyncConnection) -> None:
    """Record that this store is a copy, as a person has said."""
    await connection.execute(update(InstallationTable).values(copied_from=[]))


async def become_original(connection: AsyncConnection, known: Installation, original: str | None) -> None:
    """Take the id of the original again, or `original` if it is known otherwise: a person has said that it is gone."""
    former = dict.fromkeys([*([original] if original else []), *known.copied_from, *known.own_ids])
    first, *others = former
    values = {"uuid": UUID(first), "moved_from": others, "copied_from": [], "namespace_id": None}
    await connection.execute(update(InstallationTable).values(**values))


async def set_installation_namespace(connection: AsyncConnection, namespace_id: str | None) -> None:
    """Record the Temporal namespace that this installation works in; None: the one that the next `ratchet up` finds."""
    await connection.execute(update(InstallationTable).values(namespace_id=namespace_id))


async def _row(connection: AsyncConnection) -> Installation:
    found = await stored_installation(connection)
    assert found is not None, "the row was inserted before"
    return found
