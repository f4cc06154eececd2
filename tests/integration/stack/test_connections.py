"""Before the parts of a stack exhaust the connections of Postgres, `ratchet up` and `train --dry-run` say so."""

from pathlib import Path

import pytest

from ratchet.errors import StoreUnavailableError
from ratchet.temporal_settings import PostgresNumbers, TemporalSettings, load_temporal_settings
from stack.connections import allowed_connections, connection_demands, too_many_connections
from stack.parts import Stack
from store.database import Database
from tests.integration.training.records import make_config

CONFIG = make_config(training={"workers": 1})


def settings_with(**numbers: int) -> TemporalSettings:
    settings = load_temporal_settings()
    workers = {name: numbers.pop(name) for name in ("boot_workers", "agent_workers") if name in numbers}
    return settings.model_copy(update={"postgres": PostgresNumbers(**numbers), **workers})


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> Stack:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setenv("RATCHET_DATABASE_URL", postgres_url)
    return Stack()


async def test_the_default_sizes_fit_the_embedded_server(stack: Stack, database: Database) -> None:
    assert await allowed_connections(database) == 197
    assert await too_many_connections(stack, load_temporal_settings(), CONFIG) == ""


@pytest.mark.parametrize(
    ("numbers", "setting"),
    [
        ({"worker_pool_size": 80}, "lower postgres.worker_pool_size"),
        ({"adapter_pool_size": 90}, "lower postgres.adapter_pool_size"),
        ({"boot_workers": 64}, "lower postgres.worker_pool_size"),
        ({"agent_workers": 12, "worker_pool_size": 9}, "lower postgres.worker_pool_size"),
    ],
)
async def test_pools_that_do_not_fit_are_named_with_value_and_remedy(
    stack: Stack, numbers: dict[str, int], setting: str
) -> None:
    settings = settings_with(**numbers)
    wanted = sum(demand.connections for demand in connection_demands(stack, settings, CONFIG))
    sentence = await too_many_connections(stack, settings, CONFIG)
    assert f"may open {wanted} connections to Postgres, which allows 197 (" in sentence
    assert sentence.endswith(f"raise max_connections of the server to {wanted + 3}, or {setting}")


async def test_a_server_of_ones_own_that_does_not_answer(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_DATABASE_URL", "postgresql://u@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailableError):
        await too_many_connections(stack, load_temporal_settings(), CONFIG)


async def test_before_the_first_start_the_settings_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATCHET_DATABASE_URL", raising=False)
    stack = Stack(tmp_path / "new")
    assert await too_many_connections(stack, settings_with(max_connections=300), CONFIG) == ""
    sentence = await too_many_connections(stack, settings_with(max_connections=50), CONFIG)
    assert "which allows 47" in sentence and "raise postgres.max_connections in temporal.yaml to" in sentence
    assert not (tmp_path / "new").exists()
