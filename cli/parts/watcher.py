"""`ratchet part watcher`: probe the parts of the stack and restart those that do not answer."""

import asyncio

from stack.parts import Stack


def watcher() -> None:
    """Probe every part every few seconds, and restart a part that does not answer for long."""
    from stack.watcher import run_watcher

    asyncio.run(run_watcher(Stack()))
