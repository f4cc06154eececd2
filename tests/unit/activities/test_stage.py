"""Heartbeats of long activities."""

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.stage import heartbeating


async def test_heartbeats_do_not_wait_for_their_details() -> None:
    sent: list[tuple[Any, ...]] = []
    enough = asyncio.Event()
    asked: list[int] = []

    def note(*details: Any) -> None:
        sent.append(details)
        if len(sent) == 5:
            enough.set()

    async def progress() -> str:
        asked.append(len(asked))
        if len(asked) > 1:
            await asyncio.Event().wait()  # a store that does not answer
        return "3 turns"

    async def work() -> None:
        async with heartbeating(progress):
            await enough.wait()

    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, heartbeat_timeout=timedelta(seconds=0.03))
    environment.on_heartbeat = note
    async with asyncio.timeout(60):
        await environment.run(work)
    assert sent[0] == () and sent[-1] == ("3 turns",) and len(asked) == 2
