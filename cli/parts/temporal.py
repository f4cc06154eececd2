"""`ratchet part temporal` and `ratchet part temporal-ui`: run the local Temporal server and its UI in this process."""

from typing import Annotated

import typer

from stack.parts import Stack


def temporal(
    dev: Annotated[bool, typer.Option("--dev", help="Run the dev server of Temporal's CLI, with its UI.")] = False,
) -> None:
    """Run Temporal's server on Postgres, or the dev server on a database file in the state directory."""
    from stack import temporal_server

    stack = Stack()
    environment = stack.environment()
    if dev:
        ports = (stack.ports["temporal"], stack.ports["temporal_ui"])
        temporal_server.run_dev_server(stack.home, *ports, environment["TEMPORAL_NAMESPACE"])
    temporal_server.run_temporal_server(
        stack.ports, environment["RATCHET_DATABASE_URL"], environment["TEMPORAL_NAMESPACE"]
    )


def temporal_ui() -> None:
    """Run Temporal's web UI. The dev server brings its own."""
    from stack import temporal_server

    stack = Stack()
    temporal_server.run_temporal_ui(stack.ports["temporal_ui"], stack.environment()["TEMPORAL_ADDRESS"])
