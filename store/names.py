"""Find what a name points at. People give the names that they saw: in a table, a page, the Temporal UI or a log.

    RUN, run/RUN                                        a run
    RUN@4                                               a step
    group/RUN/3, RUN/3, evaluate/RUN/LABEL/3            a group
    evaluate/RUN/LABEL                                  an evaluation
    12, #12, rollout/RUN/3/0, RUN/3/0, rollout/adhoc/…  a rollout
    3/0                                                 a rollout of the newest run
    a task's label                                      a task

Links to pages of these, of the viewer and of the Temporal UI, point at the same.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.run_names import ROW_PAGE, plain_name, rollout_number, step_number
from store import evaluations
from store.open_runs import newest_run
from store.schema import RolloutGroupTable, RolloutTable, RunTable, TaskTable


class Kind(StrEnum):
    """The kind of a named thing."""

    RUN = "run"
    STEP = "step"
    GROUP = "group"
    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    TASK = "task"


@dataclass(slots=True, frozen=True)
class Named:
    """A thing that has a name. `id`: a row's id, a step's number, or 0. `run_id`: empty for a task. `name`: the
    workflow id of a group, rollout or evaluation, a task's label, RUN@STEP, or the run's id."""

    kind: Kind
    run_id: str
    id: int
    name: str

    @property
    def page(self) -> str:
        """Path of its page in the viewer."""
        match self.kind:
            case Kind.RUN | Kind.EVALUATION:
                return f"/runs/{self.run_id}"
            case Kind.STEP:
                return f"/runs/{self.run_id}/steps/{self.id}"
        return f"/{self.kind}s/{self.id}"


async def find_named(connection: AsyncConnection, text: str) -> Named | None:
    """Return what the name points at, or None. Raises ConfigError, naming the others, for an unknown evaluation."""
    name = plain_name(text)
    number = rollout_number(name)
    if number is not None:
        return await _row(connection, Kind.ROLLOUT, RolloutTable.id == number)
    if page := ROW_PAGE.fullmatch(name):
        if page[1] == Kind.TASK:
            return await _task(connection, TaskTable.id == rollout_number(page[2]))
        return await _row(connection, Kind.GROUP, RolloutGroupTable.id == rollout_number(page[2]))
    return await _find_in_run(connection, name) or await _task(connection, TaskTable.label == name)


async def require_named(connection: AsyncConnection, text: str, *kinds: Kind) -> Named:
    """Return the named thing of one of the kinds, of a task the newest rollout if wanted. Raises ConfigError."""
    found = await find_named(connection, text)
    if found is not None and found.kind is Kind.TASK and Kind.ROLLOUT in kinds and Kind.TASK not in kinds:
        found = await _row(connection, Kind.ROLLOUT, RolloutTable.task_id == found.id) or found
    if found is not None and found.kind in kinds:
        return found
    wanted = " or ".join(kinds)
    if found is not None:
        of_run = f" of run {found.run_id}" if found.run_id and found.kind is not Kind.RUN else ""
        raise ConfigError(f"{text!r} is a {found.kind}{of_run}; name a {wanted}")
    lists = "runs` lists those that there are" if kinds == (Kind.RUN,) else "rollouts RUN` lists those of a run"
    raise ConfigError(f"there is no {wanted} {text!r}; `ratchet show {lists}")


async def _find_in_run(connection: AsyncConnection, name: str) -> Named | None:
    run_id, _, step = name.rpartition("@")
    if run_id and (number := step_number(step)) is not None:
        return Named(Kind.STEP, run_id, number, name) if await _is_run(connection, run_id) else None
    if "/" not in name:
        return Named(Kind.RUN, name, 0, name) if await _is_run(connection, name) else None
    first, *rest = name.split("/")
    if first.isdecimal():
        first, name = "rollout", f"rollout/{await newest_run(connection)}/{name}"
    names = {name} if first in ("rollout", "group", "evaluate") else {name, f"rollout/{name}", f"group/{name}"}
    for kind, table in ((Kind.ROLLOUT, RolloutTable), (Kind.GROUP, RolloutGroupTable)):
        if (found := await _row(connection, kind, table.workflow_id.in_(names))) is not None:
            return found
    if first != "evaluate" or len(rest) != 2:
        return None
    known = [one.label for one in await evaluations.begun_evaluations(connection, rest[0])]
    if rest[1] in known:
        return Named(Kind.EVALUATION, rest[0], 0, name)
    raise ConfigError(f"run {rest[0]} has no evaluation {rest[1]!r}; it has {', '.join(known) or 'none'}")


async def _is_run(connection: AsyncConnection, run_id: str) -> bool:
    found = await connection.execute(select(RunTable.run_id).where(RunTable.run_id == run_id))
    return found.one_or_none() is not None


async def _row(connection: AsyncConnection, kind: Kind, condition: Any) -> Named | None:
    """Return the newest rollout or group that the condition is true of."""
    table: Any = RolloutTable if kind is Kind.ROLLOUT else RolloutGroupTable
    newest = select(table.run_id, table.id, table.workflow_id).where(condition).order_by(table.id.desc()).limit(1)
    row = (await connection.execute(newest)).one_or_none()
    return Named(kind, *row) if row is not None else None


async def _task(connection: AsyncConnection, condition: Any) -> Named | None:
    newest = select(TaskTable.id, TaskTable.label).where(condition).order_by(TaskTable.id.desc()).limit(1)
    row = (await connection.execute(newest)).one_or_none()
    return Named(Kind.TASK, "", *row) if row is not None else None
