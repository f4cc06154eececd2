"""Shell commands of agents, by first words or as a whole, in rollouts that solved their task and in others."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from store.arrays import unpack_json
from store.replayed_turns import COPIED
from store.rollout_words import UNREADABLE
from store.schema import BatchItemTable, GradeTable, RolloutTable, TurnTable
from store.tool_uses import object_of, read_tool_uses

_MAX_COMMANDS = 50
_MAX_CHARS = 160
_SEPARATOR = re.compile(r"&&|\|\||[;|\n]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*$")
_SUBCOMMAND = re.compile(r"[a-z][a-z-]*$")
_WITH_SUBCOMMANDS = frozenset({"git", "pip", "npm", "yarn", "cargo", "go", "make", "uv", "poetry", "docker", "apt-get"})
_NO_COMMAND = re.compile(r"[#(){}&<>'\"]|(fi|done|esac)$")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1(.*?)\n.*?^\2$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


@dataclass(slots=True, frozen=True)
class JudgedRollout:
    """A rollout with the verdict that decided its reward. `num_turns`: its model calls."""

    rollout_id: int
    solved: bool
    num_turns: int


@dataclass(slots=True, frozen=True)
class JudgedSample:
    """`rollouts`: every n-th of the `number` rollouts that match, oldest first."""

    number: int
    rollouts: list[JudgedRollout]


@dataclass(slots=True, frozen=True)
class PackedAnswer:
    """A model's answer as it is stored; `store.arrays.unpack_json` reads it."""

    rollout_id: int
    answer: bytes | None


async def sample_judged_rollouts(
    connection: AsyncConnection, run_id: str, step: int | None, purpose: str | None, size: int
) -> JudgedSample:
    """Return `size` rollouts of the run with a verdict, evenly spread over those that match, or all if they are fewer.
    `step`: only of groups that this step consumed. `purpose`: only of this purpose."""
    table = RolloutTable
    no = func.row_number().over(order_by=table.id) - 1
    judged = select(
        table.id, table.grade_id, table.num_turns, no.label("no"), func.count().over().label("number")
    ).where(table.run_id == run_id, table.grade_id.is_not(None), table.replaced_by.is_(None))
    if step is not None:
        of_step = (BatchItemTable.run_id == run_id) & (BatchItemTable.step == step)
        judged = judged.where(table.group_id.in_(select(BatchItemTable.group_id).where(of_step)))
    if purpose is not None:
        judged = judged.where(table.purpose == purpose)
    one = judged.subquery()
    statement = (
        select(one.c.id, GradeTable.solved, one.c.num_turns, one.c.number)
        .join(GradeTable, GradeTable.id == one.c.grade_id)
        .where(one.c.no * size % one.c.number < size)
        .order_by(one.c.id)
    )
    rows = (await connection.execute(statement)).all()
    return JudgedSample(rows[0].number if rows else 0, [JudgedRollout(*row[:3]) for row in rows])


def within_turns(rollouts: Sequence[JudgedRollout], max_turns: int) -> Sequence[JudgedRollout]:
    """Return the rollouts, or every second, fourth, … of them, so that they have at most `max_turns` turns together;
    at least one."""
    while len(rollouts) > 1 and sum(one.num_turns for one in rollouts) > max_turns:
        rollouts = rollouts[::2]
    return rollouts


async def read_packed_answers(connection: AsyncConnection, rollout_ids: Sequence[int]) -> list[PackedAnswer]:
    statement = (
        select(TurnTable.rollout_id, TurnTable.answer)
        .where(TurnTable.rollout_id.in_(rollout_ids), TurnTable.answer.is_not(None), TurnTable.worker != COPIED)
        .order_by(TurnTable.rollout_id, TurnTable.id)
    )
    return [PackedAnswer(*row) for row in await connection.execute(statement)]


@dataclass(slots=True, frozen=True)
class CommandCount:
    """A command by its first words, or its first line. `num_unsolved`, `num_solved`: rollouts that ran it.
    `newest_unsolved`: one of them, None if it is in solved ones only. `num_uses`: how often it was run, in all of
    them. `difference`: its share of the unsolved rollouts less that of the solved ones."""

    command: str
    num_unsolved: int
    num_solved: int
    num_uses: int
    newest_unsolved: int | None
    difference: float


def count_commands(
    rollouts: Sequence[JudgedRollout], answers: Iterable[PackedAnswer], by_line: bool = False
) -> list[CommandCount]:
    """Return the commands by the difference of their shares, those that unsolved rollouts have more often first.

    `by_line`: commands are equal if their first lines are; otherwise, if their first words are."""
    solved = {one.rollout_id: one.solved for one in rollouts}
    users: defaultdict[str, set[int]] = defaultdict(set)
    uses: defaultdict[str, int] = defaultdict(int)
    for answer in answers:
        for command in commands_of(answer.answer, by_line):
            users[command].add(answer.rollout_id)
            uses[command] += 1
    num_solved = sum(solved.values())
    counts = []
    for command, ids in users.items():
        of_solved = sum(solved[one] for one in ids)
        number = len(ids) - of_solved
        newest = max((one for one in ids if not solved[one]), default=None)
        difference = number / (len(solved) - num_solved or 1) - of_solved / (num_solved or 1)
        counts.append(CommandCount(command, number, of_solved, uses[command], newest, difference))
    counts.sort(key=lambda one: (-one.difference, -one.num_unsolved, one.command))
    return counts[:_MAX_COMMANDS]


def commands_of(packed: bytes | None, by_line: bool) -> list[str]:
    """Return the shell commands of a packed answer, by their first lines or by their first words."""
    try:
        answered = object_of(unpack_json(packed)) if packed else {}
    except UNREADABLE:  # a damaged turn
        return []
    shell = [use for use in read_tool_uses(object_of(answered.get("message"))) if use.kind == "shell"]
    if by_line:
        return [use.title[:_MAX_CHARS] for use in shell if use.title]
    return [command for use in shell for command in first_words(use.body)]


def first_words(script: str) -> list[str]:
    """Return the program of each command of a shell script, with its subcommand or module, without `cd`."""
    found = []
    # Without the contents of here-documents and with '' for each quoted text.
    for part in _SEPARATOR.split(_QUOTED.sub("''", _HEREDOC.sub(r"\3", script))):
        words = part.split()
        while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("sudo", "time", "then", "do", "else")):
            words = words[1:]
        if not words or _NO_COMMAND.match(words[0]):
            continue
        program = PurePosixPath(words[0]).name
        if program in _WITH_SUBCOMMANDS and len(words) > 1 and _SUBCOMMAND.match(words[1]):
            program += f" {words[1]}"
        elif program.startswith("python") and len(words) > 2 and words[1] == "-m":
            program += f" -m {words[2]}"
        if program != "cd":
            found.append(program[:_MAX_CHARS])
    return found
