"""`ratchet postgres`: becomes the embedded Postgres server."""

from stack.parts import Stack


def command() -> None:
    """The embedded Postgres, in the state directory."""
    from stack import postgres

    stack = Stack()
    postgres.run(stack.home / "postgres", stack.ports["postgres"])
