"""`ratchet temporal`: run Temporal's dev server in this process."""

from stack.parts import Stack


def temporal() -> None:
    """Run Temporal's server and UI on a database file in the state directory."""
    from stack import temporal_server

    stack = Stack()
    temporal_server.run_temporal(stack.home, stack.ports["temporal"], stack.ports["temporal_ui"])
