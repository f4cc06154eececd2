"""The worker of the workflows begins anew after an outage of Temporal, and ends when it has to."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from stack import worker


class Service:
    """Answers, or is away, as `statuses` say one after the other; the last one stays."""

    namespace = "default"

    def __init__(self, *statuses: RPCStatusCode | None) -> None:
        self.statuses = list(statuses)
        self.workflow_service = self

    async def describe_namespace(self, request: object) -> None:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is not None:
            raise RPCError("no", status, b"")


class Decider:
    """Stands for a Worker. `error`: raised by `run` at once."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.ended = asyncio.Event()

    async def run(self) -> None:
        if self.error is not None:
            raise self.error
        await self.ended.wait()

    async def shutdown(self) -> None:
        self.ended.set()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_LOOK_SECONDS", 0.01)


def deciding(service: Service, end: asyncio.Event, *errors: Exception | None) -> tuple[list[Decider], Any]:
    """Return the workers that are made, each with its error, and what makes them. The last one sets `end`."""
    made: list[Decider] = []
    left: Iterator[Exception | None] = iter(errors)

    def make() -> Decider:
        made.append(Decider(next(left)))
        if len(made) == len(errors):
            end.set()
        return made[-1]

    return made, worker._decide(cast(Client, service), cast(Callable[[], Worker], make), end)


AWAY, LATE = RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED


async def test_it_begins_anew_after_an_outage() -> None:
    end = asyncio.Event()
    made, running = deciding(Service(None, AWAY, AWAY, AWAY, None), end, None, None)
    await asyncio.wait_for(running, 60)
    assert len(made) == 2 and all(one.ended.is_set() for one in made)


@pytest.mark.parametrize("statuses", [(None, AWAY, None), (LATE,), (RPCStatusCode.PERMISSION_DENIED,)])
async def test_it_goes_on_while_temporal_is_slow_or_misses_one_look(statuses: tuple[RPCStatusCode | None, ...]) -> None:
    end = asyncio.Event()
    made, running = deciding(Service(*statuses), end, None, None)
    task = asyncio.ensure_future(running)
    await asyncio.sleep(0.3)
    assert len(made) == 1
    end.set()
    await asyncio.wait_for(task, 60)


async def test_a_worker_that_cannot_begin_waits_for_temporal() -> None:
    """Temporal answers one look and is away again when the next worker begins."""
    end = asyncio.Event()
    service = Service(AWAY, AWAY, None, AWAY, AWAY, None)
    made, running = deciding(service, end, None, RuntimeError("Worker validation failed"), None)
    end.clear()
    await asyncio.wait_for(running, 60)
    assert len(made) == 3


async def test_an_error_while_temporal_answers_ends_the_process() -> None:
    _, running = deciding(Service(None), asyncio.Event(), RuntimeError("a bug"), None)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(running, 60)


async def test_a_stop_during_an_outage_ends_it() -> None:
    end = asyncio.Event()
    made, running = deciding(Service(AWAY), end, None, None)
    task = asyncio.ensure_future(running)
    await asyncio.sleep(0.3)
    end.set()
    await asyncio.wait_for(task, 60)
    assert len(made) == 1
