"""The adaptive limit of a run's boxes: it shrinks if something is full, and grows slowly while nothing is.

It takes the place of `sandbox.max_boxes` for agents' boxes, and includes the same share for grading. Boxes for grading
keep to max_boxes, so that rollouts end.

    limit    it becomes                      if
    NULL     max_boxes                       `sandbox.adaptive` is on and an agent's box is asked for
    c        c + max_boxes / 8, at least 1   it holds boxes back, and nothing is full
    c        3/4 of the boxes in use         something is full: engines, the sandbox service, memory, this machine

The engines are full only if half as many calls wait as run, so that three quarters of them still use all slots.

The limit is in the run's row, so no process can lose it. It is changed by boots that wait for room, at most once in
`RISE_SECONDS`; of several that ask at once, one changes it, because the change names the limit that it was made from.
It shrinks again only when the boxes in use have come down to it: those that run are never ended.
"""

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from ratchet.types import OPEN_STATES, SandboxState, SessionState, TurnState
from store.columns import seconds_since
from store.engines import ready_engines
from store.sandboxes import count_places, places_of_agents
from store.schema import RolloutTable, RunTable, SandboxTable, SessionTable, TurnTable

RISE_SECONDS = 15.0
"""Least time between two changes, in which the last one shows its effect."""
FLOOR = 4
"""The limit never falls below so many boxes, so that a run goes on."""
MIN_FREE_MEMORY = 0.08
"""Share of the machine's memory below which the limit shrinks."""
LATE_SECONDS = 5.0
"""Lateness of the worker above which it shrinks. Full but healthy machines stay below two seconds."""
QUEUE_SHARE = 0.5
_RISE_DIVISOR = 8
_SHRINK = 0.75


@dataclass(slots=True, frozen=True)
class MachineLoad:
    """`free_memory`: share of the machine's memory. `late_seconds`: by which work begins later than it could."""

    free_memory: float
    late_seconds: float


@dataclass(slots=True, frozen=True)
class Load:
    """The figures from which the limit is computed. `boxes`: places that are taken (`sandboxes.count_places`). `calls`:
    model calls that have not ended, of which the ready engines decode `engine_slots` at once. `refused`: boxes for
    which the sandbox service has no room now. `endpoint_waits`: sessions whose endpoint does not answer now.
    `machine`: the worker's."""

    boxes: int
    calls: int
    engine_slots: int
    refused: int
    endpoint_waits: int
    machine: MachineLoad

    def fullness(self) -> str:
        """Return what is full, as a clause; empty if nothing is."""
        if self.machine.free_memory < MIN_FREE_MEMORY:
            return f"only {self.machine.free_memory:.0%} of the memory is free"
        if self.machine.late_seconds > LATE_SECONDS:
            return f"the machine is busy: stages begin {self.machine.late_seconds:.0f} s late"
        if self.refused:
            return f"the sandbox service has no room for {self.refused} boxes"
        if self.endpoint_waits:
            return f"{self.endpoint_waits} rollouts wait for their endpoint"
        if self.engine_slots and self.calls > self.engine_slots * (1 + QUEUE_SHARE):
            return f"{self.calls - self.engine_slots} of {self.calls} model calls wait in the engines' queues"
        return ""


@dataclass(slots=True, frozen=True)
class BoxCap:
    """The limit of boxes and why it is what it is."""

    limit: int
    cause: str

    def sentence(self, max_boxes: int) -> str:
        """Say both, for people; `max_boxes` is the run's `sandbox.max_boxes`."""
        return f"at most {self.limit} of {max_boxes}: {self.cause}"


def next_cap(limit: int, max_boxes: int, load: Load) -> BoxCap:
    """Return the next limit."""
    full = load.fullness()
    if full and load.boxes > limit:
        return BoxCap(limit, f"{full}; {load.boxes} boxes are still in use")
    if full:
        return BoxCap(min(max_boxes, max(FLOOR, int(load.boxes * _SHRINK))), full)
    risen = min(max_boxes, limit + max(1, max_boxes // _RISE_DIVISOR))
    if risen == max_boxes:
        return BoxCap(max_boxes, "sandbox.max_boxes")
    return BoxCap(risen, f"nothing is full, so it grows every {RISE_SECONDS:.0f} s")


async def read_cap(connection: AsyncConnection, run_id: str) -> BoxCap | None:
    """Return the run's limit; None if it has none of its own."""
    statement = select(RunTable.box_cap, RunTable.box_cap_cause).where(RunTable.run_id == run_id)
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None or row.box_cap is None else BoxCap(row.box_cap, row.box_cap_cause or "")


class OpenCap(NamedTuple):
    """The limit of an open run, and its `sandbox.max_boxes`."""

    run_id: str
    cap: BoxCap
    max_boxes: int


async def open_caps(connection: AsyncConnection) -> list[OpenCap]:
    """Return the limits of the open runs whose limit holds boxes back."""
    max_boxes = RunTable.config["sandbox"]["max_boxes"].as_integer()
    statement = select(RunTable.run_id, RunTable.box_cap, RunTable.box_cap_cause, max_boxes).where(
        RunTable.state.in_(OPEN_STATES), RunTable.box_cap < max_boxes
    )
    return [
        OpenCap(run_id, BoxCap(limit, cause or ""), most)
        for run_id, limit, cause, most in await connection.execute(statement)
        if limit is not None
    ]


async def adapt_cap(
    connection: AsyncConnection, run_id: str, config: RunConfig, provider: str, machine: MachineLoad
) -> int:
    """Return the limit of boxes now, after changing it if it is due. Call it if an agent's box is wanted."""
    max_boxes = config.sandbox.max_boxes
    due = RunTable.box_cap_at.is_(None) | (seconds_since(RunTable.box_cap_at) > RISE_SECONDS)
    statement = select(RunTable.box_cap, due).where(RunTable.run_id == run_id)
    limit, is_due = (await connection.execute(statement)).one()
    if limit is None:
        new = BoxCap(max_boxes, "sandbox.max_boxes")
    elif is_due:
        load = await read_load(connection, run_id, config, provider, machine)
        if load.boxes < places_of_agents(limit) and not load.fullness():
            return min(limit, max_boxes)  # it holds nothing back
        new = next_cap(limit, max_boxes, load)
    else:
        return min(limit, max_boxes)
    changing = update(RunTable).where(RunTable.run_id == run_id, RunTable.box_cap.is_not_distinct_from(limit), due)
    values = {"box_cap": new.limit, "box_cap_cause": new.cause, "box_cap_at": func.now()}
    if (await connection.execute(changing.values(**values))).rowcount:
        return new.limit
    changed = await read_cap(connection, run_id)
    return min(max_boxes, changed.limit if changed is not None else new.limit)


async def read_load(
    connection: AsyncConnection, run_id: str, config: RunConfig, provider: str, machine: MachineLoad
) -> Load:
    """Count what the limit is judged by. Boxes of all runs count, because they share the sandbox service."""
    refused = select(func.count()).where(
        SandboxTable.provider == provider, SandboxTable.state == SandboxState.CREATING, SandboxTable.boot_error == ""
    )
    open_sessions = (
        select(SessionTable.id, SessionTable.endpoint, SessionTable.endpoint_error)
        .join(RolloutTable, RolloutTable.id == SessionTable.rollout_id)
        .where(RolloutTable.outcome.is_(None), RolloutTable.run_id == run_id, SessionTable.state == SessionState.OPEN)
        .subquery()
    )
    calls = (
        select(func.count())
        .select_from(TurnTable)
        .join(open_sessions, open_sessions.c.id == TurnTable.session_id)
        .where(TurnTable.state == TurnState.IN_FLIGHT, open_sessions.c.endpoint.is_(None))
    )
    waits = select(func.count()).select_from(open_sessions).where(open_sessions.c.endpoint_error.is_not(None))
    return Load(
        boxes=await count_places(connection, provider),
        calls=(await connection.execute(calls)).scalar_one(),
        engine_slots=len(await ready_engines(connection, config.engine_set)) * config.engine.max_num_seqs,
        refused=(await connection.execute(refused)).scalar_one(),
        endpoint_waits=(await connection.execute(waits)).scalar_one(),
        machine=machine,
    )
