"""`ratchet explain`: say in a few sentences why a rollout has its reward."""

from typing import Annotated

import typer


def explain(
    rollout: Annotated[str, typer.Argument(help="The rollout's id or workflow id.")],
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say why a rollout has its reward: verdict, tests, agent, checks, use in training."""
    import textwrap

    from sqlalchemy.ext.asyncio import AsyncConnection

    from cli.console import print_json
    from cli.store_access import query
    from ratchet.errors import ConfigError
    from ratchet.store import reports
    from ratchet.store.views.rollout_views import read_rollout_head
    from viewer.models.explanation import WhySentence, explain_reward
    from viewer.routes.rollouts import read_reward_facts

    async def read(connection: AsyncConnection) -> list[WhySentence] | None:
        rollout_id = await reports.find_rollout(connection, rollout)
        head = await read_rollout_head(connection, rollout_id) if rollout_id is not None else None
        return None if head is None else explain_reward(await read_reward_facts(connection, head))

    sentences = query(read)
    if sentences is None:
        raise ConfigError(f"rollout {rollout} does not exist; `ratchet rollouts --run RUN` lists a run's rollouts")
    if json:
        print_json(sentences)
        return
    for sentence in sentences:
        print(textwrap.fill(sentence.text, 79, subsequent_indent="  "))
