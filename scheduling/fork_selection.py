"""Choose the training groups that begin in the middle of an earlier rollout, and the turns that they sample anew."""

import random
import re
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
_QUOTED = re.compile(
    r"(?P<shell>\b(?:ba|da|z)?sh\s+-l?c\s+)?(?P<text>'[^']*'|\"(?:\\.|[^\"\\])*\")|\\.|(?P<comment>(?<!\S)#.*)"
    r"|(?P<errors>(?<!\S)2>{1,2})"
)
_OPERATORS = "();<>|&\n"
_WORD = re.compile(rf"[{_OPERATORS}]+|[^\s{_OPERATORS}]+")
_OF_TEXT = {"cat", "echo", "printf", "sed", "awk", "sort", "head", "tail", "}", "done"}
"""Words of a command whose redirected output is an edit; that of a test, a build or a diff is a record."""
_WRITERS = {"cp", "mv", "patch", "apply", "am", "apply_patch"}
_TRIALS = {"--check", "--stat", "--dry-run"}
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
    if any(one.kind in ("edit", "write", "patch") for one in uses):
        return True
    return any(_writes(one.body[:_MAX_CHARS]) for one in uses if one.kind == "shell")


def _writes(script: str) -> bool:
    """Return whether a shell script writes a file, as far as words say; a program is one of a command's first two."""
    text = _QUOTED.sub(_syntax_of, _HEREDOC.sub(r"\g<rest>", script.replace("\\\n", " ")))
    command, is_redirected, is_text = list[str](), False, True
    for word in _WORD.findall(f"{text}\n"):
        programs = {one.rpartition("/")[2] for one in command[:2]}
        if is_redirected and not word.startswith("/dev/") and not (programs and programs.isdisjoint(_OF_TEXT)):
            return True
        is_redirected = word in (">", ">>", ">|", "&>", "&>>")
        if word.strip(_OPERATORS):
            command.append(word)
        elif not set(word) & {"<", ">"}:
            changes = not programs.isdisjoint(_WRITERS) and _TRIALS.isdisjoint(command)
            if changes or ("tee" in programs and is_text) or _IN_PLACE.search("\n".join(command)):
                return True
            # Behind parentheses no program is left: the text is then that of the commands in them.
            is_text = word != "|" or not programs.isdisjoint(_OF_TEXT) or (not programs and is_text)
            command = []
    return (program := _INTERPRETER.search(script)) is not None and bool(_WRITING_CODE.search(script, program.end()))


def _syntax_of(match: re.Match[str]) -> str:
    """Return what is read of a quotation, a comment or such: a shell's script is read whole."""
    if match["shell"]:
        return ";" + _QUOTED.sub(_syntax_of, match["text"][1:-1].replace('\\"', '"'))
    return "" if match["comment"] else "<" if match["errors"] else "Q"
