"""Compare the connections to Postgres that all parts may open with what the server allows.

A pool that is smaller than the load makes its process wait; a server whose limit is reached refuses any process
that comes next. So the sizes of the pools are to be such that their sum fits.
"""

from dataclasses import dataclass

from sqlalchemy import text

from ratchet.config import RunConfig
from ratchet.errors import StoreUnavailableError
from ratchet.temporal_settings import TemporalSettings
from stack.parts import Stack
from stack.serving_plan import read_plan
from stack.temporal_server import TemporalKind, temporal_kind
from store.database import Database
from training.service import default_workers

_RESERVED = 3
"""Connections that a server with default settings keeps for its superuser."""
_TEMPORAL = 4 * (12 + 4)
"""Four services of Temporal's server, each with its pools of stack/temporal/database.go."""
_COMMANDS = 10
"""Connections of `ratchet` commands and people's own sessions."""


@dataclass(slots=True, frozen=True)
class ConnectionDemand:
    """Connections that the processes of one part may open together. `setting`: the key of their number."""

    part: str
    connections: int
    setting: str = ""


def connection_demands(stack: Stack, settings: TemporalSettings, config: RunConfig) -> list[ConnectionDemand]:
    """Return what each part may open; of workers, as many processes are counted as temporal.yaml names."""
    pools = settings.postgres
    num_workers = max(settings.boot_workers, settings.agent_workers)
    served = {name: plan.config for name, plan in read_plan(stack).sets.items()} | {config.engine_set: config}
    num_ranks = [default_workers(one) for one in served.values() for _ in range(one.engine.lora_runs)]
    found = [
        ConnectionDemand("worker", num_workers * 2 * pools.worker_pool_size, "postgres.worker_pool_size"),
        ConnectionDemand("adapter", 2 * pools.adapter_pool_size, "postgres.adapter_pool_size"),
        ConnectionDemand("engine", 4 * len(served)),
        # The service, and of each run the driver, and per rank its own and its heartbeat's pool.
        ConnectionDemand("learner", 2 + sum(2 + 4 * number for number in num_ranks), "training.workers"),
        ConnectionDemand("watcher", 3),
        ConnectionDemand("viewer", 4),
        ConnectionDemand("commands", _COMMANDS),
    ]
    if not stack.is_external("TEMPORAL_ADDRESS") and temporal_kind(stack.home) is TemporalKind.SERVER:
        found.append(ConnectionDemand("temporal", _TEMPORAL))
    return found


async def allowed_connections(database: Database) -> int:
    """Return how many connections the server gives to ordinary roles. Raises StoreUnavailableError."""
    names = ("max_connections", "superuser_reserved_connections", "reserved_connections")  # the last from 16 on
    async with database.begin() as connection:
        values = [
            int((await connection.execute(text("SELECT current_setting(:name, true)"), {"name": name})).scalar() or 0)
            for name in names
        ]
    return values[0] - sum(values[1:])


async def too_many_connections(stack: Stack, settings: TemporalSettings, config: RunConfig) -> str:
    """Return a sentence with value and remedy if the pools exceed the server's limit; empty if they do not.

    The embedded server is taken for set as temporal.yaml says as long as it does not run.
    """
    is_own = not stack.is_external("RATCHET_DATABASE_URL")
    allowed = settings.postgres.max_connections - _RESERVED
    if not is_own or (stack.home / "postgres").is_dir():
        try:
            async with stack.database() as database:
                allowed = await allowed_connections(database)
        except StoreUnavailableError:
            if not is_own:
                raise
    demands = connection_demands(stack, settings, config)
    wanted = sum(demand.connections for demand in demands)
    if wanted <= allowed:
        return ""
    largest = sorted(demands, key=lambda demand: -demand.connections)
    listed = ", ".join(f"{demand.part} {demand.connections}" for demand in largest)
    settable = next(demand.setting for demand in largest if demand.setting)
    server = "postgres.max_connections in temporal.yaml" if is_own else "max_connections of the server"
    return (
        f"all parts together may open {wanted} connections to Postgres, which allows {allowed} ({listed}): raise "
        f"{server} to {wanted + _RESERVED}, or lower {settable}"
    )
