"""Replay the histories of a run that a stack has stored."""

import asyncio
from dataclasses import dataclass

from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer

from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.startup import connect_stack
from stack.worker import WORKFLOWS


@dataclass(frozen=True, slots=True)
class Replayed:
    """`count`: completed workflows of the run. `failures`: by workflow run id."""

    count: int
    failures: dict[str, Exception]


def replay_run(stack: Stack, run_id: str) -> Replayed:
    """Replay every completed workflow of a run with the present code."""

    async def replay() -> Replayed:
        client = await connect_stack(stack, load_temporal_settings())
        query = f"ratchet_run = '{run_id}' AND ExecutionStatus = 'Completed'"
        replayer = Replayer(workflows=WORKFLOWS, data_converter=pydantic_data_converter)
        replayed = await replayer.replay_workflows(
            client.list_workflows(query).map_histories(), raise_on_replay_failure=False
        )
        return Replayed((await client.count_workflows(query)).count, dict(replayed.replay_failures))

    return asyncio.run(replay())
