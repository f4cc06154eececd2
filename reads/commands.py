"""Shell commands of agents, by first words or as a whole, in rollouts that solved their task and in others."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ratchet.types import JsonObject
from reads.judged_rollouts import JudgedRollout, PackedAnswer
from reads.tool_uses import read_tool_use
from store.arrays import unpack_json

_MAX_COMMANDS = 50
_MAX_CHARS = 160
_SEPARATOR = re.compile(r"&&|\|\||[;|\n]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=\S*$")
_SUBCOMMAND = re.compile(r"[a-z][a-z-]*$")
_WITH_SUBCOMMANDS = frozenset({"git", "pip", "npm", "yarn", "cargo", "go", "make", "uv", "poetry", "docker", "apt-get"})
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1.*?\n.*?^\2$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


@dataclass(slots=True, frozen=True)
class CommandCount:
    """A command by its first words, or its first line. `num_unsolved`, `num_solved`: rollouts that ran it.
    `newest_unsolved`: one of them, None if it is in solved ones only. `num_uses`: how often it was run, in all of
    them."""

    command: str
    num_unsolved: int
    num_solved: int
    num_uses: int
    newest_unsolved: int | None


def count_commands(
    rollouts: Sequence[JudgedRollout], answers: Iterable[PackedAnswer], by_line: bool = False
) -> list[CommandCount]:
    """Return the commands that are in most unsolved rollouts first; of equal ones, those in fewer solved ones.

    `by_line`: commands are equal if their first lines are; otherwise, if their first words are."""
    solved = {one.rollout_id: one.solved for one in rollouts}
    users: defaultdict[str, set[int]] = defaultdict(set)
    uses: defaultdict[str, int] = defaultdict(int)
    for answer in answers:
        for command in _commands_of(answer.answer, by_line):
            users[command].add(answer.rollout_id)
            uses[command] += 1
    counts = []
    for command, ids in users.items():
        unsolved = [one for one in ids if not solved[one]]
        number = len(unsolved)
        counts.append(
            CommandCount(command, number, len(ids) - number, uses[command], max(unsolved) if unsolved else None)
        )
    counts.sort(key=lambda one: (-one.num_unsolved, one.num_solved, one.command))
    return counts[:_MAX_COMMANDS]


def _commands_of(packed: bytes | None, by_line: bool) -> list[str]:
    answered: JsonObject = unpack_json(packed) if packed else {}  # type: ignore[assignment]
    message = answered.get("message") or {}
    uses = [read_tool_use(one) for one in message.get("tool_calls") or ()]
    shell = [use for use in uses if use.kind == "shell"]
    if by_line:
        return [use.title[:_MAX_CHARS] for use in shell if use.title]
    return [command for use in shell for command in first_words(use.body)]


def first_words(script: str) -> list[str]:
    """Return the program of each command of a shell script, with its subcommand or its module (`python -m`)."""
    plain = _QUOTED.sub("''", _HEREDOC.sub("", script))
    found = []
    for part in _SEPARATOR.split(plain):
        words = part.split()
        while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("sudo", "time", "then", "do", "else")):
            words = words[1:]
        if not words or words[0].startswith(("#", "(", ")", "{", "}", "&", ">", "<", "''")):
            continue
        program = PurePosixPath(words[0]).name
        if program in ("fi", "done", "esac", "cd"):
            continue
        if program in _WITH_SUBCOMMANDS and len(words) > 1 and _SUBCOMMAND.match(words[1]):
            program += f" {words[1]}"
        elif program.startswith("python") and len(words) > 2 and words[1] == "-m":
            program += f" -m {words[2]}"
        found.append(program[:_MAX_CHARS])
    return found
