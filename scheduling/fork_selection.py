"""Choose the training groups that begin in the middle of an earlier rollout, and the turns that they sample anew."""

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
"""Longest part of a command that is read: agents write them, and heredocs without an end need quadratic time."""
_HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)\b(?P=quote)(?P<rest>[^\n]*)\n(?P<body>.*?)^[ \t]*(?P=end)$",
    re.DOTALL | re.MULTILINE,
)
_WORD = r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^\s;&|<>()'\"\\])+"
_TOKEN = re.compile(
    rf"#[^\n]*|(?P<written>[1&]?>{{1,2}}\|?[ \t]*(?!/dev/){_WORD})|\d*[<>]+(?:\(|[&|]?[ \t]*(?:{_WORD})?)"
    rf"|(?P<end>[;&|\n()]+|-exec\b)|(?P<word>{_WORD})",
    re.DOTALL,
)
"""Matches a comment, an output into a file, any other redirection, the end of a command, and a word of a shell."""
_BEFORE_PROGRAM = re.compile(
    r"[-{].*|\}|!|\d+|\w+=.*|sudo|env|time|timeout|nice|xargs|git|if|while|then|do|else|done|fi", re.DOTALL
)
"""Matches a word that may precede the name of a command's program, or the redirection of several commands."""
_OF_TEXT = {"cat", "echo", "printf", "tee", "sed", "awk", "perl", "tr", "cut", "sort", "head", "tail", "jq", "base64"}
"""Programs whose output in a file is an edit; that of a test, a build or a search is a record."""
_WRITERS = {
    "cp|mv|apply_patch": "",
    "patch|apply|am": r"\A(?!(?s:.*)^--(?:check|stat|dry-run))",
    "sed|perl|ruby": r"^-(?:[nrEsuzplw0a]*i|-in-place)",
    r"(?:python|pypy|node|ruby|perl)[\d.]*": r"\bopen\(.*,\s*(?:mode\s*=\s*)?['\"]b?[wax]|\.open\(\s*['\"]b?[wax]"
    r"|\bwrite_(?:text|bytes)\(|\bwriteFile(?:Sync)?\(",
}
"""Programs that write files, each with a pattern of the arguments, one in a line, with which they do."""


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
    """Return whether an answer's calls write a file; the redirected output of a test or a build does not count."""
    answer: Any = unpack_json(packed)
    uses = read_tool_uses(object_of(answer["message"]))
    commands = [one.body[:_MAX_CHARS] for one in uses if one.kind == "shell"]
    return _writes(commands) or any(one.kind in ("edit", "write", "patch") for one in uses)


def _writes(scripts: list[str]) -> bool:
    """Return whether one of these shell scripts writes a file, or one that it passes to a shell, which is added.

    A heredoc is an argument of its command.
    """
    for script in scripts:
        text = _HEREDOC.sub(lambda one: shlex.quote(one["body"]) + one["rest"], script.replace("\\\n", " "))
        words, is_text, is_piped, is_written = list[str](), True, False, False
        for token in _TOKEN.finditer(f"{text}\n"):
            is_written |= token["written"] is not None
            if (word := token["word"]) and (words or not _BEFORE_PROGRAM.fullmatch(word)):
                words.append(word)
            elif token["end"]:
                path, *arguments = shlex.split(" ".join(words)) or [""]
                program = path.rpartition("/")[2]
                if program:  # else the output is that of the commands before, which are in parentheses or a loop
                    is_text = program in _OF_TEXT and (is_text or not is_piped)
                patterns = (pattern for name, pattern in _WRITERS.items() if re.fullmatch(name, program))
                if any(re.search(pattern, "\n".join(arguments), re.MULTILINE) for pattern in patterns):
                    return True
                if is_text and (is_written or program == "tee"):
                    return True
                if re.fullmatch("(?:ba|da|z)?sh|eval", program):
                    scripts += arguments
                words, is_piped, is_written = [], token["end"] == "|", False
    return False
