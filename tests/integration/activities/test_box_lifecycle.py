"""A failure to end a box that is not needed any more decides nothing about a stored result."""

from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from activities.box_lifecycle import INSTALLATION_KEY, UUID_KEY, kill_and_record, try_kill_box
from ratchet.errors import ConfigError, SandboxBusyError, SandboxGoneError, SandboxRefusesError
from ratchet.types import SandboxRole
from sandboxes.base import SandboxInfo, SandboxProvider
from store import installations, sandboxes
from store.database import Database
from store.sandboxes import LedgerRow, NewSandbox
from tests.standins.scripted_boxes import ScriptedProvider

_ERRORS = [
    SandboxBusyError("away"),
    SandboxRefusesError("the key has expired"),
    ConfigError("refused"),
    ValueError("<html> is no JSON"),
    KeyError("sandboxID"),
]


class _CannotKill(ScriptedProvider):
    error: Exception | None = None

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.metadata: dict[str, dict[str, str]] = {}

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        return SandboxInfo(sandbox_id, self.metadata[sandbox_id], datetime.now(UTC), "running")

    async def kill(self, sandbox_id: str) -> bool:
        if self.error is not None:
            raise self.error
        return True


async def _live_box(database: Database, provider: _CannotKill) -> LedgerRow:
    new = NewSandbox(provider.name, SandboxRole.GRADE, None, 0, f"admit/{uuid4()}", "host")
    async with database.begin() as connection:
        row = await sandboxes.reserve_sandbox(connection, new, max_boxes=99, max_boots=99)
        assert row is not None
        await sandboxes.set_sandbox_live(connection, row.id, f"box-{row.id}")
        await sandboxes.want_sandbox_release(connection, row.id, "test")
        installation = await installations.installation_id(connection)
    provider.metadata[f"box-{row.id}"] = {INSTALLATION_KEY: str(installation), UUID_KEY: str(row.uuid)}
    return replace(row, provider_id=f"box-{row.id}")


async def _unreleased(database: Database, provider: SandboxProvider) -> set[int]:
    async with database.begin() as connection:
        return {row.id for row in await sandboxes.list_unreleased(connection, provider.name)}


@pytest.mark.parametrize("error", _ERRORS, ids=repr)
async def test_a_box_that_cannot_be_killed_is_left_to_the_sweep(database: Database, error: Exception) -> None:
    provider = _CannotKill()
    row, other = await _live_box(database, provider), await _live_box(database, provider)
    provider.error = error
    assert row.provider_id is not None
    await try_kill_box(database, provider, row.id, row.provider_id)
    if isinstance(error, SandboxBusyError):
        with pytest.raises(type(error)):
            await kill_and_record(database, provider, [row, other])
    else:
        await kill_and_record(database, provider, [row, other])
    assert {row.id, other.id} <= await _unreleased(database, provider)
    provider.error = SandboxGoneError("it has ended")
    await kill_and_record(database, provider, [row, other])
    assert not {row.id, other.id} & await _unreleased(database, provider)
    await provider.close()
