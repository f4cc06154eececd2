"""`ratchet part postgres`: run the embedded Postgres server in this process."""

from stack.parts import Stack


def postgres() -> None:
    """Run the embedded Postgres on the state directory."""
    from ratchet.temporal_settings import load_temporal_settings
    from stack import postgres

    stack = Stack()
    max_connections = load_temporal_settings().postgres.max_connections
    postgres.run_postgres(stack.home / "postgres", stack.ports["postgres"], max_connections, stack.postgres_hosts)
