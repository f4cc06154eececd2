"""`ratchet train`: start or continue a run, follow it, and print its result."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import print_json, print_table, say
from cli.up import DEFAULT_CONFIG
from ratchet.config_engines import LOCAL
from ratchet.config_sources import load_config
from ratchet.durations import duration_in_words
from ratchet.errors import ConfigError
from ratchet.temporal_settings import load_temporal_settings
from ratchet.vime_names import dump_pattern
from stack.parts import Stack

COLUMNS = {
    "training reward": ("training_reward", "{:.3f}"),
    "rollouts": ("rollouts", "{:.0f}"),
    "tokens": ("trained_tokens", "{:.0f}"),
    "|Δ logprob|": ("mismatch_abs", "{:.4f}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad norm": ("grad_norm", "{:.2f}"),
    "seconds": ("step_seconds", "{:.1f}"),
}
"""Title of a column of a run's curve → metric and format; `ratchet watch` has the same. The reward is no metric."""
_COLUMN_NOTES = (
    "training reward: mean over all groups of the step. rollouts: those of the groups trained on, without groups of\n"
    "equal rewards. tokens: trained ones (with `training.negative_weight: 0` only of rollouts above their group's\n"
    "mean). |Δ logprob|: mean absolute difference, per trained token, between the learner's logprob and the one that\n"
    "the engine recorded."
)


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")] = DEFAULT_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    new: Annotated[
        bool,
        typer.Option(
            "--new", help="Start a new run, not the unfinished one. Refused while a run of its engine set is open."
        ),
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the run has started.")] = False,
    from_store: Annotated[
        str | None, typer.Option("--from-store", help="Train on the stored groups of this run, without rollouts.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", "--dry-run", help="Check all, print placement and size; start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train: set up the stack, start or continue the run, follow it, print the curve and the commands that show more.

    Interrupting the command leaves the run going; the same command follows it again. Arguments of vime's training
    command may follow the config (docs/vime.md).
    """
    from stack.agent_programs import provide_program
    from stack.follow_run import run_name
    from stack.huge_pages import advice, kernel_setting
    from stack.startup import bring_up
    from training.rollout_dumps import dump_path, request_dumps

    stack = Stack()
    if str(config).startswith("--"):
        raise ConfigError(f"{config}: name the config's file first, and arguments of vime after it")
    resolved = load_config(config, set or [], arguments=context.args)
    if check:
        _check(stack, resolved)
        return
    dumps = dump_path(pattern) if (pattern := dump_pattern(context.args)) else None
    if found := advice(kernel_setting(), os.environ):
        say(found)
    if from_store is None:
        provide_program(resolved.harness.name, stack.has_gateway, say)
    bring_up(stack, resolved, say, for_run=from_store is None)
    run_id = _start(stack, resolved, run_name(config), from_store, new)
    request_dumps(run_id, dumps)
    if not detach:
        _follow(stack, run_id, config, from_store is not None, json)


def _start(stack: Any, config: Any, name: str, from_store: str | None, new: bool) -> str:
    from stack.follow_run import start_run
    from stack.train_from_store import start_stored_run

    if from_store is not None:
        return asyncio.run(start_stored_run(stack, config, name, from_store, new, say))
    try:
        run_id = asyncio.run(start_run(stack, config, name, new, say))
    except KeyboardInterrupt:
        say("interrupted; a run that was named above goes on, and `ratchet show runs` lists it once it is accepted")
        raise typer.Exit(130) from None
    say(f"run {run_id}: {stack.workflow_page(f'run/{run_id}')}")
    return run_id


def _follow(stack: Any, run_id: str, config: Path, is_stored: bool, json: bool) -> None:
    from stack.follow_run import follow_to_end
    from stack.train_from_store import follow_stored_run

    try:
        result = asyncio.run((follow_stored_run if is_stored else follow_to_end)(stack, run_id, say))
    except KeyboardInterrupt:
        say(
            f"Detached; run {run_id} continues. `ratchet train {config}` follows it again, "
            "`ratchet down` stops the stack and the run until the next `ratchet up`"
        )
        raise typer.Exit(130) from None
    if json:
        print_json(result)
    elif is_stored:
        _print_steps(result)
    else:
        _print(result, stack)
        if shutil.which("ratchet") is None:
            say("`source .venv/bin/activate` puts `ratchet` on PATH")
        say(f"rollouts: `ratchet show rollouts {run_id}`; one of them: `ratchet show rollout ID`")
        say(f"workflow: {stack.workflow_page(f'run/{run_id}')}")
        say("the stack keeps running: `ratchet down` stops it")
    if result["state"] != "done":
        raise typer.Exit(1)


def _check(stack: Any, config: Any) -> None:
    from stack.connections import too_many_connections
    from stack.engine_parts import place_parts
    from stack.gpus import usable_gpus
    from stack.learner_models import LearnerModels
    from stack.run_size import describe_run
    from stack.startup import check_start

    check_start(config, say)
    if warning := asyncio.run(too_many_connections(stack, load_temporal_settings(), config)):
        say(warning)
    for line in describe_run(LearnerModels(config), place_parts(config), {LOCAL: len(usable_gpus())}):
        print(line)
    training = config.training
    say(
        f"{training.steps} steps of {training.groups_per_step} groups of {training.group_size} rollouts by "
        f"{config.harness.name}; model {config.model}; nothing was started"
    )


def with_reward(metrics: dict[str, float], reward: float | None) -> dict[str, float]:
    """Return what `COLUMNS` names: a step's metrics with its training reward, if it has one."""
    return metrics if reward is None else metrics | {"training_reward": reward}


def _print_steps(result: dict[str, Any]) -> None:
    rows = [
        [str(step["step"]), *(form.format(found[name]) if name in found else "" for name, form in COLUMNS.values())]
        for step in result["steps"]
        if (found := step["metrics"] and with_reward(step["metrics"], step["reward"]))
    ]
    print_table(f"run {result['run_id']}", ["step", *COLUMNS], rows)
    if rows:
        print(_COLUMN_NOTES)


def _print(result: dict[str, Any], stack: Any) -> None:
    from stack.curve import draw

    _print_steps(result)
    _print_cost(result["cost"])
    summary = result["summary"]
    if summary is None:
        return
    evaluations = [
        [label, _with_interval(found), str(found["tasks"])] for label, found in summary["evaluations"].items()
    ]
    print_table("held-out mean reward (95% bootstrap, over tasks)", ["evaluation", "mean", "tasks"], evaluations)
    differences = [[kind, _with_interval(found), str(found["tasks"])] for kind, found in summary["differences"].items()]
    print_table("after - before, paired by task", ["", "difference", "tasks"], differences)
    datasets = [
        [kind, name, f"{found['start']:.2f}", f"{found['end']:.2f}", _with_interval(found["difference"])]
        for kind, by_name in summary["datasets"].items()
        for name, found in by_name.items()
    ]
    if datasets:
        print_table("per dataset", ["", "dataset", "before", "after", "after - before"], datasets)
    kinds: dict[str, Any] = summary["families"]
    families = [
        [family, *(f"{found[family][when]:.2f}" for found in kinds.values() for when in ("start", "end"))]
        for family in next(iter(kinds.values()), {})
    ]
    columns = ["family", *(f"{kind} {when}" for kind in kinds for when in ("before", "after"))]
    print_table("per family", columns, families)
    picture = stack.home / "curves" / f"{result['run_id']}.png"
    picture.parent.mkdir(exist_ok=True)
    curve = [(one["step"], one["reward"]) for one in result["steps"] if one["reward"] is not None]
    draw({result["run_id"]: curve}, {result["run_id"]: summary}, f"run {result['run_id']}", picture)
    say(f"picture: {picture}")


def _print_cost(cost: dict[str, Any]) -> None:
    if not cost["num_rollouts"]:
        return
    used = sorted(cost["cpu_seconds"].items(), key=lambda item: -item[1])
    rows = [[part, f"{seconds / cost['num_rollouts']:.3f}"] for part, seconds in used]
    rows.append(["all", f"{sum(cost['cpu_seconds'].values()) / cost['num_rollouts']:.3f}"])
    rate = cost["num_rollouts"] * 60 / cost["seconds"]
    print_table(
        f"CPU seconds per rollout, {cost['num_rollouts']} rollouts in {duration_in_words(cost['seconds'])} "
        f"({rate:.0f} per minute)",
        ["part", ""],
        rows,
    )


def _with_interval(found: dict[str, float]) -> str:
    return f"{found['mean']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
