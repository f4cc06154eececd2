"""`ratchet recall`: the extent of a fault of a task, a grader or some verdicts in a run. It changes nothing."""

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import print_json, print_table
from ratchet.durations import duration_in_words

if TYPE_CHECKING:
    from reads.recall import Recall

_DATES = ["%Y-%m-%d", *(f"%Y-%m-%d{between}%H:%M{end}" for between in "T " for end in ("", ":%S", "%z", ":%S%z"))]
_MAX_LISTED = 3


def recall(
    run: Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")],
    task: Annotated[str | None, typer.Option(help="A task that is wrong.")] = None,
    grader: Annotated[str | None, typer.Option(help="A grader that is wrong, or a version of it: eval_cmd@5.")] = None,
    rollout: Annotated[list[str] | None, typer.Option(help="A rollout with a wrong verdict. Repeatable.")] = None,
    since: Annotated[
        datetime | None, typer.Option(formats=_DATES, metavar="DATE", help="Only verdicts since then, in local time.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what wrong verdicts have touched in a run, and what it would cost to put right. It changes nothing.

    A group rests on the verdicts of all its members; with `training.advantage: batch` its whole step does, which is not
    counted. Steps count by the verdicts that they were planned with.
    """
    from client import Client

    found = Client().run(run).recall(task, grader, rollout or (), since)
    print_json(asdict(found)) if json else _print(found)


def _print(found: "Recall") -> None:
    start = "the run's first weights" if found.start_step is None else f"the weights of step {found.start_step}"
    verdicts = f"{found.num_solved} solved, {found.num_not_solved} not solved, {found.num_without_verdict} without one"
    facts = {
        "verdicts": f"on {found.num_rollouts} rollouts, {found.num_groups} groups, {found.num_tasks} tasks: {verdicts}",
        "trained groups": f"{found.num_trained_groups}, {found.num_partly_touched} of them with other members, too",
        "trained tokens": f"{found.num_trained_tokens}, {found.num_own_tokens} of them of these rollouts",
        "trained steps": f"{found.num_steps}, the first is step {found.first_step}" if found.num_steps else "none",
        "last clean checkpoint": f"{found.clean_checkpoint or 'none'}; begin from {start}" if found.num_steps else "-",
        **{f"evaluation {one.label}": f"{one.num_touched} of {one.num_counted} rollouts, of step {one.step}"
           for one in found.evaluations},
        **{f"run {name}": cause for name, cause in found.descendants.items()},
        "to grade again": f"{found.num_patches} patches, about {duration_in_words(found.grading_seconds)} in boxes",
        "to train again": f"{found.num_steps_again} steps, {found.num_tokens_again} tokens",
    }  # fmt: skip
    since = "" if found.since is None else f" since {found.since:%Y-%m-%d %H:%M:%S %z}"
    print_table(
        f"recall of {found.run_id}{since}", ["what", "how much"], [list(one) for one in facts.items()], breaks_last=True
    )
    print("nothing was changed; once the fault is mended:" if found.commands else "nothing was changed")
    num_regrades = sum(" regrade " in one for one in found.commands)
    for command in [*found.commands[:num_regrades][:_MAX_LISTED], *found.commands[num_regrades:]]:
        print(f"  {command}")
    if num_regrades > _MAX_LISTED:
        print(f"--json has all {num_regrades} commands that grade again")
    if found.num_steps:
        is_stored = "--from-store" in found.commands[-1]
        print("rewards that a step has used stay" + ("" if is_stored else "; the new run samples and grades its own"))
