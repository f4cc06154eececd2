"""`ratchet postgres`: run the embedded Postgres server in this process."""

from stack.parts import Stack


def postgres() -> None:
    """Run the embedded Postgres on the state directory."""
    from stack import postgres

    stack = Stack()
    postgres.run_postgres(stack.home / "postgres", stack.ports["postgres"])
