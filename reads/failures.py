"""Failed rollouts of a run in clusters: with the same error, failed test or last command, or an empty patch alike."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, any_, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import FAILED_OUTCOMES, Outcome, Purpose
from reads.commands import commands_of
from reads.reward_explanation import EXITS
from store.columns import seconds_of
from store.schema import GradeTable, PatchTable, RolloutTable, TaskTable, TurnTable

NUM_ROLLOUTS = 5000
HOUR_SECONDS = 3600.0
_MAX_ERRORS = 1000
_MAX_FAILED = 150
_MAX_TESTS = 20
_LOST = (*FAILED_OUTCOMES, Outcome.REJECTED)
_NOT_FAILED = ("passed", "skipped", "xfailed", "xpassed")
_LAST_ANSWERS = 2
"""Turns in which the last command is looked for; in the last one, an agent often only says that it is done."""
_MAX_CHARS = 200
_SAID_CHARS = 70
_KINDS = {"error": "error", "test": "failed test", "command": "last command", "empty": "empty patch"}
_OF_ONE = ("error", "empty")
"""Kinds of which one rollout is a cluster."""
_ID = re.compile(r"\b(?=\w*\d)[\w-]+")
"""A word with a digit: a count, a duration, a box's or rollout's id."""


def kind_of_error(text: str) -> str:
    """Return the error without the numbers and ids by which errors of one kind differ."""
    return _ID.sub("#", text)


@dataclass(slots=True, frozen=True)
class FailureCluster:
    """Failed rollouts with the same error, failed test, last command or cause of an empty patch: `kind` is one of
    `_KINDS`. `num_examined`: the rollouts among which those of this kind were looked for. `in_hour` and `hour_before`:
    those that ended in `Failures.hour`, and in the hour before. `command`: the commonest last command of their agents,
    empty if there is none. `example`: the id of the newest of them that ended with this command."""

    kind: str
    what: str
    number: int
    num_examined: int
    example: int
    in_hour: int
    hour_before: int
    command: str = ""

    def sentence(self, hour: str, scope: str = "") -> str:
        """Return what is alike, with the numbers and one example. `scope`: words that follow the kind."""
        what = self.what if len(self.what) <= _SAID_CHARS else f"{self.what[:_SAID_CHARS]}…"
        number = f"{self.number}" if self.kind == "error" else f"{self.number} of {self.num_examined} examined"
        if self.kind not in _OF_ONE:
            return f"{_KINDS[self.kind]}{scope}: `{what}` ({number}, such as rollout {self.example})"
        hours = f", {self.in_hour} in the {hour}" if self.in_hour else ""
        hours += f", {self.hour_before} in the hour before" if self.hour_before else ""
        ran = f" with last command `{self.command}`" if self.command else ""
        return f"{_KINDS[self.kind]}{scope}: {what} ({number}{hours}, such as rollout {self.example}{ran})"


@dataclass(slots=True, frozen=True)
class Failures:
    """The clusters of a run's failed rollouts. `hour`: the name of the hour until now, or until the run's end.
    `num_empty`: rollouts with an empty patch among the newest `num_unsolved` that did not solve their task."""

    clusters: list[FailureCluster]
    hour: str
    num_unsolved: int = 0
    num_empty: int = 0

    def of_kind(self, kind: str) -> list[FailureCluster]:
        return [one for one in self.clusters if one.kind == kind]

    def commonest_error(self) -> str:
        """Name the commonest error without a verdict: of those in the newest hour, or of all if it has none."""
        lost = [one for one in self.of_kind("error") if not one.what.startswith(Outcome.REJECTED)]
        if not lost:
            return "no error"
        scope = f" of the {self.hour}" if lost[0].in_hour else ""  # those of the newest hour come first
        return f"commonest {lost[0].sentence(self.hour, scope)}"

    def commonest_causes(self) -> list[str]:
        """Name the largest cluster of each other kind, the largest first."""
        largest: dict[str, FailureCluster] = {}
        for one in sorted(self.clusters, key=lambda one: -one.number):
            largest.setdefault(one.kind, one)
        return [f"commonest {one.sentence(self.hour)}" for kind, one in largest.items() if kind != "error"]


async def cluster_failures(
    connection: AsyncConnection, run_id: str, limit: int, ended_at: datetime | None = None
) -> Failures:
    """Return the `limit` clusters of each kind with most rollouts of the newest hour, then with most rollouts.

    Errors are of the newest 1,000 rollouts that ended without a verdict or were rejected. Tests and commands are of the
    newest 150 of these, and of the newest 150 that did not solve their task among the newest 5,000; empty patches only
    of the latter. Two equal tests or commands are a cluster. `ended_at`: the end of the newest hour, None: now."""
    of_run, newest = RolloutTable.run_id == run_id, RolloutTable.id.desc()
    is_lost = of_run & RolloutTable.purpose.in_(list(Purpose)) & RolloutTable.outcome.in_(_LOST)
    age = seconds_of((func.now() if ended_at is None else literal(ended_at)) - RolloutTable.ended_at).label("age")
    reason = func.left(RolloutTable.outcome_reason, 2 * _MAX_CHARS).label("reason")
    errors = select(RolloutTable.id, RolloutTable.outcome, reason, age).where(is_lost).order_by(newest)
    found: dict[str, dict[str, list[int]]] = {kind: defaultdict(list) for kind in _KINDS}
    ages: dict[int, float] = {}
    for row in await connection.execute(errors.limit(_MAX_ERRORS)):
        words = " ".join(kind_of_error(row.reason).split())[:_MAX_CHARS]
        found["error"][f"{row.outcome.replace('_', ' ')}: {words}"].append(row.id)
        ages[row.id] = row.age
    commands: dict[int, str] = {}
    num_errors, rows = len(ages), (await connection.execute(_with_last_answers(run_id, is_lost, age))).all()
    num_unsolved = sum(row.outcome == Outcome.GRADED for row in rows)
    num_examined = {"error": num_errors, "empty": num_unsolved}
    for row in rows:
        ages[row.id] = row.age
        for test in row.tests:
            found["test"][f"{test} of {row.label}"].append(row.id)
        if row.num_bytes == 0 and row.outcome == Outcome.GRADED:
            why = kind_of_error(row.patch_reason) or f"the agent {EXITS.get(row.agent_exit, row.agent_exit)}"
            found["empty"][why[:_MAX_CHARS]].append(row.id)
        ran = (commands_of(answer, by_line=True) for answer in row.answers)
        commands[row.id] = next((names[-1] for names in ran if names), "")
        if commands[row.id]:
            found["command"][commands[row.id]].append(row.id)
    clusters = []
    for kind, alike in found.items():
        for what, ids in alike.items():
            lines = Counter(commands[one] for one in ids if commands.get(one))
            hours = Counter(int(ages[one] // HOUR_SECONDS) for one in ids if ages[one] is not None)
            command = max(lines, key=lines.__getitem__, default="")
            example = next((one for one in ids if command and commands.get(one) == command), ids[0])
            numbers = (len(ids), num_examined.get(kind, len(rows)), example, hours[0], hours[1])
            if kind in _OF_ONE or len(ids) > 1:
                clusters.append(FailureCluster(kind, what, *numbers, command))
    clusters.sort(key=lambda one: (-one.in_hour, -one.number))
    largest = [one for kind in _KINDS for one in [one for one in clusters if one.kind == kind][:limit]]
    hour = "last hour" if ended_at is None else "run's last hour"
    return Failures(largest, hour, num_unsolved, sum(map(len, found["empty"].values())))


def _with_last_answers(run_id: str, is_lost: ColumnElement[bool], age: ColumnElement[float]) -> Any:
    """Select the newest rollouts that failed, newest first, with failed tests, patch and last answers."""
    of_run, newest = RolloutTable.run_id == run_id, RolloutTable.id.desc()
    columns = select(RolloutTable.id, RolloutTable.grade_id, RolloutTable.outcome).where(of_run)
    window = columns.order_by(newest).limit(NUM_ROLLOUTS).subquery()
    is_unsolved = (GradeTable.id == window.c.grade_id) & (window.c.outcome == Outcome.GRADED) & ~GradeTable.solved
    unsolved = select(window.c.id).join(GradeTable, is_unsolved).order_by(window.c.id.desc()).limit(_MAX_FAILED)
    lost = select(RolloutTable.id).where(is_lost).order_by(newest).limit(_MAX_FAILED)
    one = func.jsonb_each_text(GradeTable.tests).table_valued("key", "value", joins_implicitly=True)
    tests = select(one.c.key).where(func.lower(one.c.value).not_in(_NOT_FAILED))
    tests = tests.order_by(one.c.key).limit(_MAX_TESTS)
    answers = select(TurnTable.answer).where(TurnTable.rollout_id == RolloutTable.id, TurnTable.answer.is_not(None))
    answers = answers.order_by(TurnTable.id.desc()).limit(_LAST_ANSWERS).correlate(RolloutTable)
    return (
        select(
            RolloutTable.id,
            RolloutTable.outcome,
            RolloutTable.agent_exit,
            TaskTable.label,
            PatchTable.num_bytes,
            PatchTable.reason.label("patch_reason"),
            age,
            func.array(tests.correlate(GradeTable).scalar_subquery()).label("tests"),
            func.array(answers.scalar_subquery()).label("answers"),
        )
        .join(TaskTable, TaskTable.id == RolloutTable.task_id)
        .outerjoin(GradeTable, GradeTable.id == RolloutTable.grade_id)
        .outerjoin(PatchTable, PatchTable.id == GradeTable.patch_id)
        .where(RolloutTable.id == any_(func.array(union_all(lost, unsolved).scalar_subquery())))
        .order_by(newest)
    )
