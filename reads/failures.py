"""Failed rollouts of a run in clusters: those with the same error, the same failed test, or the same last command."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, any_, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import FAILED_OUTCOMES, Outcome, Purpose
from reads.commands import commands_of
from store.schema import GradeTable, RolloutTable, TaskTable, TurnTable

NUM_ROLLOUTS = 5000
_MAX_FAILED = 150
_MAX_TESTS = 20
_LOST = (*FAILED_OUTCOMES, Outcome.REJECTED)
_NOT_FAILED = ("passed", "skipped", "xfailed", "xpassed")
_LAST_ANSWERS = 2
"""Turns in which the last command is looked for; in the last one, an agent often only says that it is done."""
_MAX_CHARS = 200
_SAID_CHARS = 70
_KINDS = {"error": "error", "test": "failed test", "command": "last command"}
_ID = re.compile(r"\b(?=\w*\d)[\w-]+")
"""A word with a digit: a count, a duration, a box's or rollout's id."""


def kind_of_error(text: str) -> str:
    """Return the error without the numbers and ids by which errors of one kind differ."""
    return _ID.sub("#", text)


@dataclass(slots=True, frozen=True)
class FailureCluster:
    """Failed rollouts with the same error (perhaps one only), failed test or last command: `kind` is one of `_KINDS`.
    `share`: of the failed rollouts that were looked at. `newest`: the id of one of them. `command`: the commonest last
    command of their agents, empty if there is none."""

    kind: str
    what: str
    number: int
    share: float
    newest: int
    command: str = ""

    def sentence(self) -> str:
        what = self.what if len(self.what) <= _SAID_CHARS else f"{self.what[:_SAID_CHARS]}…"
        ran = f", last command `{self.command}`" if self.kind == "error" and self.command else ""
        what = what if self.kind == "error" else f"`{what}`"
        share = "" if self.kind == "error" else f", {self.share:.0%}"
        return f"{_KINDS[self.kind]}: {what} ({self.number}{share}, newest rollout {self.newest}{ran})"


def commonest_failure(clusters: Iterable[FailureCluster], kind: str) -> str:
    """Name the largest cluster of a kind, or say that there is none."""
    none = f"no {_KINDS[kind]}" + ("" if kind == "error" else " is shared")
    return next((f"commonest {one.sentence()}" for one in clusters if one.kind == kind), none)


def _last_answers() -> ColumnElement[Any]:
    """Return the column with the last answers of a rollout's model, newest first."""
    answers = select(TurnTable.answer).where(TurnTable.rollout_id == RolloutTable.id, TurnTable.answer.is_not(None))
    newest = answers.order_by(TurnTable.id.desc()).limit(_LAST_ANSWERS).correlate(RolloutTable)
    return func.array(newest.scalar_subquery()).label("answers")


def _last_command(answers: Sequence[bytes]) -> str:
    commands = (commands_of(answer, by_line=True) for answer in answers)
    return next((names[-1] for names in commands if names), "")


async def cluster_failures(connection: AsyncConnection, run_id: str, limit: int) -> list[FailureCluster]:
    """Return the largest `limit` clusters of each kind. The newest 150 rollouts are looked at that ended without a
    verdict or were rejected, and of the newest 5,000 the newest 150 that did not solve their task. Two equal tests or
    commands are a cluster."""
    of_run, newest = RolloutTable.run_id == run_id, RolloutTable.id.desc()
    columns = select(RolloutTable.id, RolloutTable.grade_id, RolloutTable.outcome).where(of_run)
    window = columns.order_by(newest).limit(NUM_ROLLOUTS).subquery()
    is_unsolved = (GradeTable.id == window.c.grade_id) & (window.c.outcome == Outcome.GRADED) & ~GradeTable.solved
    unsolved = select(window.c.id).join(GradeTable, is_unsolved).order_by(window.c.id.desc()).limit(_MAX_FAILED)
    is_lost = RolloutTable.purpose.in_(list(Purpose)) & RolloutTable.outcome.in_(_LOST)
    lost = select(RolloutTable.id).where(of_run, is_lost).order_by(newest).limit(_MAX_FAILED)
    one = func.jsonb_each_text(GradeTable.tests).table_valued("key", "value", joins_implicitly=True)
    tests = select(one.c.key).where(func.lower(one.c.value).not_in(_NOT_FAILED))
    tests = tests.order_by(one.c.key).limit(_MAX_TESTS)
    statement = (
        select(
            RolloutTable.id,
            RolloutTable.outcome,
            RolloutTable.outcome_reason,
            TaskTable.label,
            func.array(tests.correlate(GradeTable).scalar_subquery()).label("tests"),
            _last_answers(),
        )
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .outerjoin(GradeTable, GradeTable.id == RolloutTable.grade_id)
        .where(RolloutTable.id == any_(func.array(union_all(lost, unsolved).scalar_subquery())))
        .order_by(newest)
    )
    rows = (await connection.execute(statement)).all()
    found: dict[str, dict[str, list[int]]] = {kind: defaultdict(list) for kind in _KINDS}
    commands: dict[int, str] = {}
    for row in rows:
        if row.outcome != Outcome.GRADED:
            reason = " ".join(kind_of_error(row.outcome_reason).split())[:_MAX_CHARS]
            found["error"][f"{row.outcome.replace('_', ' ')}: {reason}"].append(row.id)
        for test in row.tests:
            found["test"][f"{test} of {row.label}"].append(row.id)
        commands[row.id] = _last_command(row.answers)
        if commands[row.id]:
            found["command"][commands[row.id]].append(row.id)
    return [
        FailureCluster(kind, what, len(ids), len(ids) / len(rows), ids[0], max(ran, key=ran.__getitem__, default=""))
        for kind, clusters in found.items()
        for what, ids in sorted(clusters.items(), key=lambda item: -len(item[1]))[:limit]
        for ran in [Counter(commands[one] for one in ids if commands[one])]
        if kind == "error" or len(ids) > 1
    ]
