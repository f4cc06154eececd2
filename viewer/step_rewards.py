"""Rewards of steps, kept in memory: they are read from all rollouts of a step, and change only with the newest step.

The planner fixes a step's groups with their rewards; a later verdict changes no reward of a rollout whose group
a step has used (`store.rollouts.update_reward`). Only the newest step may be discarded and planned anew.
"""

from sqlalchemy.ext.asyncio import AsyncConnection

from reads.curves import StepReward, rewards_by_step

_MAX_KEPT = 50_000


class StepRewards:
    def __init__(self) -> None:
        self._known: dict[tuple[str, int], StepReward | None] = {}

    async def read(self, connection: AsyncConnection, run_id: str, first: int, last: int) -> list[StepReward]:
        """Return the rewards of steps first to last, the newest, but steps of forks alone; unknown ones are read."""
        steps = range(max(1, first), last + 1)
        found = {step: self._known[run_id, step] for step in steps if (run_id, step) in self._known}
        missing = [step for step in steps if step not in found]
        if missing:
            read = {one.step: one for one in await rewards_by_step(connection, run_id, missing[0], missing[-1])}
            found |= {step: read.get(step) for step in missing}
            if len(self._known) > _MAX_KEPT:
                self._known.clear()
            self._known |= {(run_id, step): found[step] for step in missing if step != last}
        return [one for step in steps if (one := found[step]) is not None]
