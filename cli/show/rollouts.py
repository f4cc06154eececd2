"""`ratchet show rollouts` and `waiting`: list the rollouts of a run, and what the open ones wait for."""

from dataclasses import asdict
from typing import Annotated

import typer

from cli.console import print_found
from ratchet.bounded_numbers import MAX_ROWS
from ratchet.durations import duration_in_words

NewestRun = Annotated[
    str | None, typer.Argument(help="A run of `ratchet show runs`; by default the newest open one.", metavar="RUN")
]


def rollouts(
    run_id: NewestRun = None,
    outcome: Annotated[str | None, typer.Option(help="graded, rejected, infra_failed, …, or open.")] = None,
    agent_exit: Annotated[str | None, typer.Option(help="How the agent ended, for example time_budget.")] = None,
    purpose: Annotated[str | None, typer.Option(help="train or eval.")] = None,
    task: Annotated[str | None, typer.Option(help="A part of the task's label.")] = None,
    reason: Annotated[str | None, typer.Option(help="A part of the outcome's reason.")] = None,
    reward: Annotated[float | None, typer.Option(min=-1e9, max=1e9, help="Exactly this reward.")] = None,
    flagged: Annotated[
        bool, typer.Option("--flagged", help="Only rollouts whose grade has flags, or was rejected.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rollouts, newest first.")] = 50,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List a run's rollouts with outcome and reward."""
    from client import Client
    from reads.rollout_list import RolloutFilter, list_rollout_lines

    run = Client().run(run_id).run_id
    wanted = RolloutFilter(
        run_id=run,
        purpose=purpose,
        outcome=outcome,
        agent_exit=agent_exit,
        reward_from=reward,
        reward_to=reward,
        task=task,
        reason=reason,
        flagged=flagged,
    )
    found = Client().read(lambda connection: list_rollout_lines(connection, wanted, limit))
    columns = ["id", "task", "outcome", "reward", "agent_exit", "turns", "reason"]
    rows = [
        [
            str(line.id),
            line.task,
            line.outcome or "open",
            "" if line.reward is None else f"{line.reward:g}",
            line.agent_exit or "",
            str(line.num_turns),
            "; ".join(f"{flag['what']} ({flag['place']})" for flag in line.flags or []) or line.reason,
        ]
        for line in found
    ]
    print_found([asdict(line) for line in found], json, f"rollouts of {run}", columns, rows)


def waiting(
    run_id: NewestRun = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="Maximum number of rollouts.")] = 20,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List open rollouts by how long they have been in their stage: who waits for what, and since when. `ratchet show
    rollout ID` says what a rollout does now; `ratchet stop` and `ratchet retry` take an id or a group."""
    from client import Client
    from store import open_rollouts

    run = Client().run(run_id)
    found = Client().read(lambda connection: open_rollouts.list_slowest(connection, run.run_id, limit))
    rows = [
        [str(one.rollout_id), one.group, str(one.member), duration_in_words(one.seconds), one.stage] for one in found
    ]
    columns = ["id", "group", "member", "since", "stage"]
    print_found([asdict(one) for one in found], json, f"open rollouts of {run.run_id}", columns, rows)
