"""`ratchet recall`: the extent of a fault of tasks, a grader or some verdicts in a run, and what puts it right."""

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import print_json, print_table, say
from ratchet.durations import duration_in_words

if TYPE_CHECKING:
    from reads.recall import Recall

_DATES = ["%Y-%m-%d", *(f"%Y-%m-%d{between}%H:%M{end}" for between in "T " for end in ("", ":%S", "%z", ":%S%z"))]


def recall(
    run: Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")],
    task: Annotated[str | None, typer.Option(help="A task that is wrong.")] = None,
    family: Annotated[str | None, typer.Option(help="A family of tasks that is wrong (metadata.family).")] = None,
    grader: Annotated[str | None, typer.Option(help="A grader that is wrong, or a version of it: eval_cmd@5.")] = None,
    rollout: Annotated[list[str] | None, typer.Option(help="A rollout with a wrong verdict. Repeatable.")] = None,
    since: Annotated[
        datetime | None, typer.Option(formats=_DATES, metavar="DATE", help="Only verdicts since then, in local time.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Stop the run, grade the patches again, and train from there in a new run.")
    ] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what wrong verdicts have touched in a run, and what it would cost to put right.

    With --apply, mended datasets are imported, and the new run first trains stored groups again, as many steps as
    training.max_staleness allows, before it samples. If the command is cut, give it again.

    A group rests on the verdicts of all its members; with `training.advantage: batch` its whole step does, which is not
    counted. Steps count by the verdicts that they were planned with.
    """
    from client import Client

    of = Client().run(run)
    found = of.recall(task, grader, rollout or (), since, family)
    shown = {name: value for name, value in asdict(found).items() if name != "task_ids"}  # which may be thousands
    print_json(shown) if json else _print(found)
    if not apply:
        say("nothing was changed; once the fault is mended, --apply puts it right")
    elif (new := of.apply_recall(found, say)) is not None:
        say(f"`ratchet watch {new.run_id}` follows the new run")


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
