"""`ratchet learner`: one Ray Train driver per running run."""

import asyncio

from stack.parts import Stack


def command() -> None:
    """The learner service: trains whatever run is running."""
    from training.service import run_service

    stack = Stack()
    asyncio.run(run_service(stack.environment()["RATCHET_DATABASE_URL"]))
