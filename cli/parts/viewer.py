"""`ratchet part viewer`: serve the viewer."""

from typing import Annotated

import typer

from stack.parts import Stack


def viewer(
    host: Annotated[str, typer.Option(help="Address to listen on; without loopback, readers need a token.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Serve the read-only pages about runs and rollouts."""
    from cli.view import viewer_settings
    from viewer.app import serve_viewer

    serve_viewer(viewer_settings(Stack(), host))
