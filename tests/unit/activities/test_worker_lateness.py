"""How late a worker is."""

import asyncio
import time

import pytest

from activities.worker_lateness import WorkerLateness


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock's time, which the test moves."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_stages_that_begin_late_show_and_a_few_of_them_do_not(clock: list[float]) -> None:
    lateness = WorkerLateness()
    assert lateness.seconds() == 0.0

    def pass_between_stages(seconds: float, waits_for_slot: bool = False) -> None:
        lateness.stage_ended("rollout", 3)
        clock[0] += seconds
        lateness.stage_began("rollout", 4, waits_for_slot)

    for seconds in (0.25, 0.25, 9.0, 0.25, 0.25):
        pass_between_stages(seconds)
    assert lateness.seconds() == 0.25
    pass_between_stages(15.0, waits_for_slot=True)
    assert lateness.seconds() == 0.25, "a stage that waits for a slot is not late"
    for _ in range(2):
        pass_between_stages(9.0)
    assert lateness.seconds() == 9.0
    clock[0] += 60
    assert lateness.seconds() == 0.0, "it was late a minute ago"


def test_a_first_stage_says_nothing(clock: list[float]) -> None:
    lateness = WorkerLateness()
    lateness.stage_began("rollout", 1, False)
    lateness.stage_ended("other", 1)
    clock[0] += 50
    lateness.stage_began("rollout", 2, False)
    assert lateness.seconds() == 0.0


def test_stages_that_another_worker_has_run_are_no_lateness(clock: list[float]) -> None:
    lateness = WorkerLateness()
    lateness.stage_ended("rollout", 2)
    clock[0] += 600  # the agent's stage, 3, ran elsewhere
    lateness.stage_began("rollout", 4, False)
    assert lateness.seconds() == 0.0


async def test_a_blocked_process_is_late() -> None:
    lateness = WorkerLateness()
    task = asyncio.create_task(lateness.follow())
    await asyncio.sleep(0.1)
    time.sleep(2.0)
    await asyncio.sleep(0.1)
    task.cancel()
    assert 0.5 < lateness.seconds() < 30
