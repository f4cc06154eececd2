"""Ratchet in Python and notebooks: start, watch, steer and read runs. `ratchet`, the command, is built on it.

    from client import Client

    run = Client().run()                       # the newest one
    run.steps().frame()                        # a pandas data frame
    run.set({"training.max_staleness": 2})
    run.wait()

`ReadOnlyClient` answers in pages of bounded size for programs, and cannot write; `ratchet admin mcp` offers it as
tools.

It is above `stack`, because it starts workflows and reads the stack's addresses.
"""

from client.read_only_client import ReadOnlyClient
from client.session import Client, Rows, Run

__all__ = ["Client", "ReadOnlyClient", "Rows", "Run"]
