"""`ratchet part worker`: run a Temporal worker for some or all task queues."""

import asyncio
import os
from typing import Annotated

import typer

from ratchet.temporal_settings import QUEUES, QUEUES_VARIABLE
from stack.parts import Stack


def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Task queue. Repeat the option for several; default: RATCHET_WORKER_QUEUES, else all."),
    ] = None,
) -> None:
    """Run a worker, which polls task queues and runs workflows and activities."""
    from ratchet.errors import ConfigError
    from ratchet.temporal_settings import load_temporal_settings
    from ratchet.trace_export import start_exporting
    from stack.worker import run_worker

    queues = queue or (os.environ.get(QUEUES_VARIABLE) or ",".join(QUEUES)).split(",")
    unknown = [name for name in queues if name not in QUEUES]
    if unknown:
        raise ConfigError(f"--queue {unknown[0]}: unknown; expected one of {', '.join(QUEUES)}")
    start_exporting("worker")
    url = Stack().environment()["RATCHET_DATABASE_URL"]
    asyncio.run(run_worker(queues, load_temporal_settings(), url))
