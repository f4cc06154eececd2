"""`ratchet part learner`: run the learner service, which starts one driver process per running run."""

import asyncio

from stack.parts import Stack


def learner() -> None:
    """Run the learner service, which trains every running run."""
    from training.service import run_learner_service

    stack = Stack()
    asyncio.run(run_learner_service(stack.environment()["RATCHET_DATABASE_URL"]))
