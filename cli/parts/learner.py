"""`ratchet learner`: run the learner service, which starts one driver process per running run."""

import asyncio

from stack.parts import Stack
from stack.postgres import wait_for_schema


def learner() -> None:
    """Run the learner service, which trains every running run."""
    from training.service import run_learner_service

    stack = Stack()
    url = stack.environment()["RATCHET_DATABASE_URL"]
    asyncio.run(wait_for_schema(url))
    asyncio.run(run_learner_service(url))
