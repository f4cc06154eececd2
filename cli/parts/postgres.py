"""`ratchet postgres`: becomes the embedded Postgres server."""

from stack.parts import Stack


def postgres() -> None:
    """The embedded Postgres, in the state directory."""
    from stack import postgres

    stack = Stack()
    postgres.run_postgres(stack.home / "postgres", stack.ports["postgres"])
