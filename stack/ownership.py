"""Check that database and namespace are whole and belong together, as `ratchet up` requires; it changes nothing."""

from dataclasses import dataclass

from temporalio.service import RPCError

from ratchet.errors import MachineError, StoreUnavailableError
from ratchet.secrets import without_secrets
from ratchet.temporal_settings import load_temporal_settings
from stack import temporal_namespace
from stack.parts import Stack
from stack.startup import connect_stack
from store.migration import schema_problem


@dataclass(slots=True, frozen=True)
class OwnershipCheck:
    """`problem`: what is wrong and how it is undone, empty if nothing is."""

    what: str
    problem: str


async def check_ownership(stack: Stack) -> list[OwnershipCheck]:
    """Look at the schema's revision in the database, and at the installation that the namespace belongs to."""
    checks = []
    try:
        async with stack.database() as database:
            problem = await database.run(schema_problem)
            checks.append(OwnershipCheck("schema", problem))
            if not problem:
                client = await connect_stack(stack, load_temporal_settings())
                is_own = not stack.is_external("TEMPORAL_ADDRESS")
                await temporal_namespace.require_own_namespace(client, database, load_temporal_settings(), is_own)
                checks.append(OwnershipCheck("installation", ""))
    except (StoreUnavailableError, MachineError, RPCError) as error:
        what = "installation" if checks else "schema"
        checks.append(OwnershipCheck(what, without_secrets(str(error))))
    return checks
