"""`ratchet part postgres`: run the embedded Postgres server in this process."""

from typing import Annotated

import typer

from stack.parts import Stack


def postgres(
    hosts: Annotated[str, typer.Option(help="The head's address and those of the hosts that may connect.")] = "",
) -> None:
    """Run the embedded Postgres on the state directory."""
    from ratchet.temporal_settings import load_temporal_settings
    from stack import postgres

    stack = Stack()
    max_connections = load_temporal_settings().postgres.max_connections
    postgres.run_postgres(stack.home / "postgres", stack.ports["postgres"], max_connections, hosts.split())
