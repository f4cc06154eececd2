"""`ratchet learner`: one Ray Train driver per running run."""

import asyncio

from stack.parts import Stack


def learner() -> None:
    """The learner service: trains whatever run is running."""
    from training.service import run_learner_service

    stack = Stack()
    asyncio.run(run_learner_service(stack.environment()["RATCHET_DATABASE_URL"]))
