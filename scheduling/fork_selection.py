"""Choose the training groups that begin in the middle of an earlier rollout, and the turns that they sample anew."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from scheduling.quarantine import quarantined_tasks
from store import forks
from store.arrays import logprobs_from_bytes, unpack_json
from store.forks import ForkableTurn
from store.groups import NewGroup
from store.tool_uses import object_of, read_tool_uses

_MAX_TRIES = 8
_MAX_CHARS = 4000
"""Longest part of a command that is looked at: agents write them, and the patterns need quadratic time."""
_QUOTED = re.compile(
    r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)(?P<rest>[^\n]*)\n.*?(?:^\s*(?P=end)$|\Z)"
    r"|(?P<shell>\b(?:ba|z|da)?sh\s+-l?c\s+)?(?P<text>'[^']*'|\"(?:\\.|[^\"\\])*\")|(?<!\S)\#[^\n]*|\\.",
    re.DOTALL | re.MULTILINE,
)
"""Matches what a shell does not read as syntax: heredocs, quoted words, comments, and escaped characters."""
_WRITING = re.compile(
    r"\b(?:cat|echo|printf)\b[^;&|\n]*(?:(?<![02-9&>])>{1,2}\s*(?![\s>&(]|/dev/)|\|\s*(?:sudo\s+)?tee\b)"
    r"|\btee\b[^;&|\n]*<<|\b(?:sed|perl|ruby)\s[^;&|\n]*?(?<=\s)-(?:[nrEsuzplw0a]*i|-in-place)"
    r"|\bgit\s+(?:apply|am)\b(?!\s+--(?:check|stat))|(?:^|[;&|(])\s*(?:sudo\s+)?patch\b(?![^;&|\n]*--dry-run)",
    re.MULTILINE,
)
"""Matches a shell command that writes a text of its own into a file, or changes one."""
_PROGRAM = re.compile(
    r"^(?!.*\b(?:e?grep|rg|ag)\b).*(?:(?:\bopen\(.*,\s*(?:mode\s*=\s*)?|\.open\(\s*)\\?['\"]b?[wax][bt+]*\\?['\"]"
    r"|\bwrite_(?:text|bytes)\(|\bwriteFile(?:Sync)?\(|\*\*\* Begin Patch)",
    re.MULTILINE,
)
"""Matches a program in a command that writes a file, or a patch, unless its line searches for one."""


async def with_forks(connection: AsyncConnection, new: Sequence[NewGroup], config: RunConfig) -> list[NewGroup]:
    """Return the new groups of a run, of which `training.forks` makes a share forks of its earlier rollouts.

    The caller creates them in the same transaction. Seed, group numbers and stored rows decide everything, so a
    transaction that is tried again chooses the same.
    """
    wanted = config.training.forks
    if not (wanted.share and new):
        return list(new)
    oldest = new[0].started_step - max(1, config.training.max_staleness)
    left_out = await quarantined_tasks(connection, new[0].run_id, config.training.groups_per_step)
    ids = [task.task_id for task in left_out]
    rollouts = await forks.forkable_rollouts(connection, new[0].run_id, oldest, wanted.turn == "mixed", ids)
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
    writes = any(_PROGRAM.search(one) or _WRITING.search(_QUOTED.sub(_syntax_of, one)) for one in commands)
    return writes or any(one.kind in ("edit", "write", "patch") for one in uses)


def _syntax_of(match: re.Match[str]) -> str:
    if match["end"]:
        return f"<< {match['rest']}\n"
    if match["shell"]:
        return f";{match['text'][1:-1]}"
    return " " if match[0] == "\\\n" or match[0].startswith("#") else "Q"
