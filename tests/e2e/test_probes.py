"""The real stack's probes: every part answers, probes leave nothing that counts, suspended parts come back."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from stack.part_health import HealthState, PartHealth, read_health
from stack.parts import Stack
from tests.chaos.faults import wait_until

Read = Callable[[Callable[[AsyncConnection], Any]], Any]


def answering(stack: Stack) -> dict[str, PartHealth]:
    return {name: part for name, part in read_health(stack.home).items() if part.state is HealthState.ANSWERING}


def test_every_part_answers_and_its_probes_leave_no_trace(stack: Stack, read: Read) -> None:
    wait_until(lambda: answering(stack).keys() == read_health(stack.home).keys() != set(), "every part answers")
    tables = ("session", "turn", "rollout", "sandbox", "run")

    async def rows(connection: AsyncConnection) -> list[int]:
        return [(await connection.execute(text(f"SELECT count(*) FROM {name}"))).scalar_one() for name in tables]

    before, began = read(rows), time.time()
    wait_until(
        lambda: all(part.last_answer_at > began + 10 for part in answering(stack).values()),
        "each has been probed twice",
    )
    assert read(rows) == before


def test_suspended_parts_are_restarted_and_nothing_else_is(stack: Stack) -> None:
    """Temporal and the adapter at once; the worker and the engine need them, or not, and keep their processes."""
    wait_until(lambda: answering(stack).keys() == read_health(stack.home).keys(), "every part answers")
    before = answering(stack)
    for name in ("temporal", "adapter"):
        pid = before[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    def is_back() -> bool:
        now = answering(stack)
        return now.keys() == before.keys() and all(
            now[name].pid != before[name].pid for name in ("temporal", "adapter")
        )

    wait_until(is_back, "both are back")
    after = answering(stack)
    changed = {name for name in before if after[name].pid != before[name].pid}
    assert changed == {"temporal", "adapter"}
    assert all("SIGSTOP" in after[name].last_error for name in changed)
