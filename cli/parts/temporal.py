"""`ratchet temporal`: becomes Temporal's dev server."""

from stack.parts import Stack


def temporal() -> None:
    """Temporal's server with its UI, on a database file in the state directory."""
    from stack import temporal_server

    stack = Stack()
    temporal_server.run_temporal(stack.home, stack.ports["temporal"], stack.ports["temporal_ui"])
