"""How late a worker is."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from activities.worker_lateness import WorkerLateness


def info(scheduled: datetime, delay: float) -> Any:
    return cast(
        Any,
        SimpleNamespace(current_attempt_scheduled_time=scheduled, started_time=scheduled + timedelta(seconds=delay)),
    )


def test_one_late_value_is_no_overload_and_many_are() -> None:
    lateness = WorkerLateness()
    assert lateness.seconds() == 0.0
    now = datetime.now(UTC) + timedelta(seconds=1)
    for delay in [0.1] * 19 + [60.0]:
        lateness.see(info(now, delay))
    assert lateness.seconds() == 0.1
    for _ in range(5):
        lateness.see(info(now, 60.0))
    assert lateness.seconds() == 60.0


def test_work_that_waited_for_the_process_to_start_does_not_count() -> None:
    lateness = WorkerLateness()
    lateness.see(info(datetime.now(UTC) - timedelta(hours=1), 3600.0))
    assert lateness.seconds() == 0.0


async def test_a_blocked_process_is_late() -> None:
    lateness = WorkerLateness()
    task = asyncio.create_task(lateness.follow())
    await asyncio.sleep(0.1)
    time.sleep(2.0)
    await asyncio.sleep(0.1)
    task.cancel()
    assert 0.5 < lateness.seconds() < 30
