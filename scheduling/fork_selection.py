"""Choose the training groups that begin in the middle of an earlier rollout, and the turns that they sample anew."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.config import RunConfig
from store import forks
from store.arrays import logprobs_from_bytes, unpack_json
from store.forks import ForkableTurn
from store.groups import NewGroup

_MAX_TRIES = 8
_EDIT = re.compile(
    r'"(?:old_str\w*|new_str\w*|edits|content|file_text|patch)":|\*\*\* Begin Patch|\bsed -i|\btee\b|\bgit apply\b'
    r"|\b(?:cat|echo|printf)\b[^|]*>\s*(?!/dev/)[\w./~$\\'\"]|\bwrite_text\(|\bopen\([^)]*['\"][wa]b?\\?['\"]"
)
"""Matches the JSON of tool calls that write a file: argument names of editing tools, a patch, or a shell command."""


async def with_forks(connection: AsyncConnection, new: Sequence[NewGroup], config: RunConfig) -> list[NewGroup]:
    """Return the new groups of a run, of which `training.forks` makes a share forks of its earlier rollouts.

    The caller creates them in the same transaction. Seed, group numbers and stored rows decide everything, so a
    transaction that is tried again chooses the same.
    """
    wanted = config.training.forks
    if not wanted.share:
        return list(new)
    oldest = new[0].started_step - max(1, config.training.max_staleness)
    rollouts = await forks.forkable_rollouts(connection, new[0].run_id, oldest, wanted.turn == "mixed")
    found = list[NewGroup]()
    for group in new:
        draw = random.Random(f"{config.seed}/forks/{group.group_no}")
        is_fork = draw.random() < wanted.share
        for rollout_id in draw.sample(rollouts, min(len(rollouts), _MAX_TRIES)) if is_fork else ():
            turn = choose_turn(await forks.forkable_turns(connection, rollout_id), wanted.turn, draw)
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
    answer: Any = unpack_json(packed)
    return _EDIT.search(orjson.dumps(answer["message"].get("tool_calls")).decode()) is not None
