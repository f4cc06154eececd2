"""Work beside a block ends with it, fails without the block, and hides no cancellation of the caller."""

import asyncio

import pytest
from structlog.testing import capture_logs

from ratchet.background_task import errors_logged, running_beside
from ratchet.errors import SandboxBusyError


class _SlowEnd:
    """Work that notices its cancellation at once and ends only once it is allowed to."""

    def __init__(self) -> None:
        self.is_ending = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_ending.set()
            await self.may_end.wait()
            self.has_ended = True


async def test_a_caller_that_is_cancelled_while_the_work_ends_is_cancelled() -> None:
    """A stop at this moment was lost before: an engine went on for ever after its SIGTERM."""
    work = _SlowEnd()

    async def call() -> None:
        async with running_beside(work.run()):
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    caller = asyncio.create_task(call())
    await work.is_ending.wait()
    caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done(), "the work is still ending"
    work.may_end.set()
    done, _ = await asyncio.wait({caller}, timeout=60)
    assert done and caller.cancelled() and work.has_ended


async def test_the_work_ends_with_the_block() -> None:
    work = _SlowEnd()
    work.may_end.set()
    async with running_beside(work.run()):
        await asyncio.sleep(0)
        assert not work.has_ended
    assert work.has_ended


async def test_an_error_of_the_work_does_not_fail_the_block_and_is_logged() -> None:
    """It was raised at the end of the block before, so that an agent that had ended well was thrown away."""

    async def fail() -> None:
        raise ValueError("no heartbeat")

    with capture_logs() as logged:
        async with running_beside(fail()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert [repr(line["exc_info"]) for line in logged] == ["ValueError('no heartbeat')"]


@pytest.mark.parametrize("error", [ValueError("wrong"), SandboxBusyError("later"), KeyError("bug")])
async def test_a_step_of_a_loop_logs_its_error_and_a_cancellation_goes_through(error: Exception) -> None:
    with capture_logs() as logged, errors_logged("not renewed", rollout_id=7):
        raise error
    assert [(line["event"], line["rollout_id"]) for line in logged] == [("not renewed", 7)]
    with pytest.raises(asyncio.CancelledError), errors_logged("not renewed"):
        raise asyncio.CancelledError


async def test_an_error_of_the_block_is_raised_after_the_work_has_ended() -> None:
    work = _SlowEnd()
    work.may_end.set()
    with pytest.raises(KeyError, match="block"):
        async with running_beside(work.run()):
            await asyncio.sleep(0)
            raise KeyError("block")
    assert work.has_ended


async def test_a_cancelled_block_ends_the_work_and_stays_cancelled() -> None:
    work = _SlowEnd()
    work.may_end.set()

    async def call() -> None:
        async with running_beside(work.run()):
            await asyncio.Event().wait()

    caller = asyncio.create_task(call())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller}, timeout=60)
    assert caller.cancelled() and work.has_ended
