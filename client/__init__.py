"""Ratchet in Python and notebooks: start, watch, steer and read runs. `ratchet`, the command, is built on it.

    from client import Client

    run = Client().run()                       # the newest one
    run.steps().frame()                        # a pandas data frame
    run.set({"training.max_staleness": 2})
    run.wait()

It is above `stack`, because it starts workflows and reads the stack's addresses.
"""

from client.session import Client, Rows, Run

__all__ = ["Client", "Rows", "Run"]
