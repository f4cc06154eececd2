"""`ratchet admin mcp`: offer the reads of runs to a coding agent, over stdin and stdout."""


def mcp() -> None:
    """Serve read-only tools about runs and rollouts to a coding agent (Model Context Protocol over stdio).

    For example: claude mcp add ratchet -- ratchet admin mcp
    """
    import logging
    import sys

    import structlog

    from client.mcp_server import make_server

    # Only messages of the protocol may be written to stdout.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    make_server().run("stdio")
