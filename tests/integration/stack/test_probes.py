"""A database of a service is probed by the address that the service gives, with TLS in it."""

from pathlib import Path

import pytest

from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.probes import Probes
from store.database import Database
from tests.free_ports import free_ports


@pytest.mark.parametrize("name", ["ssl", "sslmode"])
async def test_a_database_whose_address_asks_for_tls(
    name: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prefer` takes a server without TLS, too; a driver that does not know the name refuses any value of it."""
    url = f"{postgres_url}?{name}=prefer"
    monkeypatch.setenv("RATCHET_DATABASE_URL", url)
    free_ports(tmp_path)
    stack = Stack(tmp_path)
    assert stack.is_external("RATCHET_DATABASE_URL")
    assert (await Probes(stack, load_temporal_settings(), lambda part: None).postgres()).startswith("postgres ")
    async with Database(url, pool_size=1) as database:
        assert [tuple(row) for row in await database.fetch("SELECT 1")] == [(1,)]
