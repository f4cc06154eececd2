"""A rollout, a step or a run in a few plain sentences: `ratchet explain`, and the same for programs."""

from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.run_names import step_number
from reads.reward_explanation import explain_reward
from reads.rollouts import find_rollout, read_rollout_facts, require_rollout
from reads.run_facts import read_run_facts
from reads.run_story import explain_run, explain_step
from reads.runs import read_run_head
from reads.step_facts import read_step_facts


async def explain_thing(connection: AsyncConnection, what: str) -> list[str]:
    """Return the sentences about a rollout (its id or workflow id), RUN@STEP or RUN.

    Raises ConfigError if it does not exist.
    """
    run_id, _, step = what.rpartition("@")
    if run_id and (number := step_number(step)) is not None:
        if (facts := await read_step_facts(connection, run_id, number)) is not None:
            return explain_step(facts)
    elif await find_rollout(connection, what) is not None:
        rollout = await read_rollout_facts(connection, await require_rollout(connection, what))
        return [one.text for one in explain_reward(rollout)]
    elif (head := await read_run_head(connection, what)) is not None:
        return explain_run(await read_run_facts(connection, head))
    raise ConfigError(
        f"there is no rollout, step or run {what!r}; `ratchet show runs` and `ratchet show rollouts` list them"
    )
