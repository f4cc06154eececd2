"""`ratchet temporal`: becomes Temporal's dev server."""

from stack.parts import Stack


def command() -> None:
    """Temporal's server with its UI, on a database file in the state directory."""
    from stack import temporal_server

    stack = Stack()
    temporal_server.run(stack.home, stack.ports["temporal"], stack.ports["temporal_ui"])
