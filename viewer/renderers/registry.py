"""The renderers by grader, and what they get and return. A dataset of the run's config may name another (`renderer`).

A renderer is `function(rollout: ShownRollout) -> list[OwnPart]`. Its texts are escaped like all others, so it cannot
add markup or scripts to a page.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.errors import ConfigError
from ratchet.import_path import import_function
from ratchet.types import JsonObject
from reads.conversation import TurnView
from reads.reader_role import ReadOnlyStore
from reads.rollouts import GradeView, RolloutHead
from reads.tasks import read_task_spec, renderer_of

RENDERERS = {name: "viewer.renderers.listed_tests:render" for name in ("swe_bench", "swepro")}
MAX_ROWS = 500


@dataclass(slots=True, frozen=True)
class ShownRollout:
    """`task`: the row's metadata, with its problem statement. `turns`: those on this page of the conversation. `patch`:
    of the newest attempt. `grade`: the one that decided the reward, else the newest, None without one."""

    head: RolloutHead
    task: JsonObject
    turns: Sequence[TurnView]
    patch: str
    grade: GradeView | None


@dataclass(slots=True, frozen=True)
class OwnPart:
    """A part of the page: a text, a table, or both. `path`: its suffix chooses how the text is highlighted, `.diff`
    among them. `rows`: the first one is the head; at most `MAX_ROWS` are shown."""

    title: str
    text: str = ""
    path: str = ""
    rows: Sequence[Sequence[str]] = ()


async def own_parts(
    store: ReadOnlyStore, head: RolloutHead, turns: Sequence[TurnView], patch: str, grade: GradeView | None
) -> list[OwnPart]:
    """Return what the task's renderer makes, in a thread; if it fails, a part that says so; empty without one."""
    async with store.read() as connection:
        name = await renderer_of(connection, head.run_id, head.task_id)
        path = RENDERERS.get(name, name)
        if ":" not in path:
            return []
        task = await read_task_spec(connection, head.task_id)
    return await asyncio.to_thread(_rendered, path, ShownRollout(head, task, turns, patch, grade))


def _rendered(path: str, rollout: ShownRollout) -> list[OwnPart]:
    try:
        return [
            OwnPart(
                str(one.title),
                str(one.text),
                str(one.path),
                [[str(cell) for cell in row] for row in one.rows[: MAX_ROWS + 1]],
            )
            for one in import_function("datasets.renderer", path)(rollout)
        ]
    except ConfigError as error:
        return [OwnPart("The renderer cannot be used", str(error))]
    except Exception as error:  # a user's own code may raise anything
        return [OwnPart("The renderer failed", f"{path}: {type(error).__name__}: {error}")]
