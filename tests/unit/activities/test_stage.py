"""Heartbeats of long activities, and the errors that Temporal stores."""

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.converter import default
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.stage import activity_stage, heartbeating
from ratchet.errors import EngineRejectedError


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


async def test_an_error_that_quotes_bytes_can_be_stored_by_temporal() -> None:
    @activity_stage("test")
    async def refuse() -> None:
        raise EngineRejectedError("no JSON: \0\udcff")

    with pytest.raises(ApplicationError) as raised:
        await ActivityEnvironment().run(refuse)
    assert raised.value.message == "no JSON: \\0\\udcff" and raised.value.type == "EngineRejectedError"
    await default().encode_failure(raised.value, Failure())
