"""Say in a few lines what a run does and waits for, for the details of its workflow in the Temporal UI."""

import os

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.durations import duration_in_words
from ratchet.types import GroupState
from store import groups, learners, open_rollouts, plans
from store.runs import RunRow


async def describe_situation(connection: AsyncConnection, run: RunRow) -> str:
    """Return the open rollouts by stage with the slowest of each, the ready groups, the planned step, the learner."""
    lines = [
        f"{one.count} rollouts: {one.stage}, the longest for {duration_in_words(one.longest_seconds)}"
        for one in await open_rollouts.count_open_rollouts(connection, run.run_id)
    ]
    needed = run.resolved_config.training.groups_per_step
    ready = await groups.count_groups_in_state(connection, run.run_id, GroupState.READY)
    lines.append(f"{ready} groups are ready; a step takes {needed}")
    planned = await plans.unfinished_step(connection, run.run_id)
    learner = await learners.get_learner(connection, run.run_id)
    if planned is not None:
        lines.append(f"step {planned} is planned and not trained")
    if learner is not None:
        lines.append(
            f"learner: {learner.phase} {learner.step}, heartbeat {duration_in_words(learner.silent_seconds)} ago"
        )
    return "\n".join(lines)


def viewer_link(page: str) -> str:
    """Return a paragraph with the page's address in the viewer, as Markdown; empty if the stack has told none."""
    viewer = os.environ.get("RATCHET_VIEWER_URL", "").rstrip("/")
    return f"\n\n[{page} in the viewer]({viewer}{page})" if viewer else ""
