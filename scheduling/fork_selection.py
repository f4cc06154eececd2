"""Choose the training groups that begin in the middle of an earlier rollout, and the turns that they sample anew."""

import contextlib
import random
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from store import forks
from store.arrays import logprobs_from_bytes, unpack_json
from store.forks import ForkableTurn
from store.groups import NewGroup
from store.tool_uses import object_of, read_tool_uses

_MAX_TRIES = 8
_MAX_CHARS = 4000
"""Longest part of a command that is read: agents write them, and some of the patterns need quadratic time."""
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(?P<end>\w+)\1(?P<rest>.*)\n(?:.*\n)*?[ \t]*(?P=end)$", re.MULTILINE)
_COMMENT = re.compile(r"(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.)|(?<!\S)#.*")
_ERRORS = re.compile(r"(?<!\S)2>{1,2}")
_OPERATORS = "();<>|&\n"
_WRITERS = {"tee", "cp", "mv", "patch", "apply", "am", "apply_patch"}
_IN_PLACE = re.compile(r"^(?:.*/)?(?:sed|perl|ruby)\n(?:.*\n)*?(?:-[A-Za-z0]*i\b|--in-place)", re.MULTILINE)
_INTERPRETER = re.compile(r"\b(?:python|node)[\d.]*\b")
_MODE = r"\\?['\"][wax][bt+]*\\?['\"]"
_WRITING_CODE = re.compile(
    rf"\bopen\([^\n]{{0,200}}?,\s*(?:mode\s*=\s*)?{_MODE}|\.open\({_MODE}|\bwrite_(?:text|bytes)\(|\bwriteFile"
)


async def with_forks(
    connection: AsyncConnection, new: Sequence[NewGroup], config: RunConfig, left_out: Collection[int]
) -> list[NewGroup]:
    """Return the new groups of a run, of which `training.forks` makes a share forks of its earlier rollouts, but none
    of the tasks `left_out`.

    The caller creates them in the same transaction. Seed, group numbers and stored rows decide everything, so a
    transaction that is tried again chooses the same.
    """
    wanted = config.training.forks
    if not (wanted.share and new):
        return list(new)
    oldest = new[0].started_step - max(1, config.training.max_staleness)
    rollouts = await forks.forkable_rollouts(connection, new[0].run_id, oldest, wanted.turn == "mixed", left_out)
    found = list[NewGroup]()
    for group in new:
        draw = random.Random(f"{config.seed}/forks/{group.group_no}")
        is_fork = draw.random() < wanted.share
        for rollout_id in draw.sample(rollouts, min(len(rollouts), _MAX_TRIES)) if is_fork else ():
            turn = choose_turn(await forks.forkable_turns(connection, rollout_id, wanted.turn), wanted.turn, draw)
            if turn is not None and not turn.is_forked and turn.id not in {one.forked_turn_id for one in found}:
                group = replace(group, task_id=turn.task_id, forked_turn_id=turn.id)
                break
        found.append(group)
    return found


def choose_turn(turns: Sequence[ForkableTurn], rule: str, draw: random.Random) -> ForkableTurn | None:
    """Return the turn that `training.forks.turn` names; None if there is no such turn."""
    if rule == "first_edit":
        return next((one for one in turns if _writes_file(one.answer)), None)
    if rule == "entropy":
        return min(turns, key=lambda one: float(logprobs_from_bytes(one.logprobs).mean()), default=None)
    return draw.choice(turns) if turns else None


def _writes_file(packed: bytes) -> bool:
    """Return whether an answer's calls write a file."""
    answer: Any = unpack_json(packed)
    uses = read_tool_uses(object_of(answer["message"]))
    scripts = [one.body[:_MAX_CHARS] for one in uses if one.kind == "shell"]
    return any(one.kind in ("edit", "write", "patch") for one in uses) or any(map(_writes, scripts))


def _writes(script: str) -> bool:
    """Return whether a shell script, as far as its words say, writes a file: by a redirection, a program, or code.

    A program is looked for among the first two words of a command. A script within a script is not read.
    """
    text = _HEREDOC.sub(r"\g<rest>", script.replace("\\\n", " "))
    text = _ERRORS.sub("<", _COMMENT.sub(lambda one: one["quoted"] or "", text))
    lexer = shlex.shlex(f"{text}\n", posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    command, is_redirected = list[str](), False
    with contextlib.suppress(ValueError):  # a quotation without an end
        for word in lexer:
            if is_redirected and not word.startswith("/dev/"):
                return True
            is_redirected = word in (">", ">>", ">|", "&>", "&>>")
            if word.strip(_OPERATORS):
                command.append(word)
            elif not is_redirected:
                programs = {one.rpartition("/")[2] for one in command[:2]}
                if not programs.isdisjoint(_WRITERS) or _IN_PLACE.search("\n".join(command)):
                    return True
                command = []
    program = _INTERPRETER.search(script)
    return program is not None and _WRITING_CODE.search(script, program.end()) is not None
