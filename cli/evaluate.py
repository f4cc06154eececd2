"""`ratchet evaluate` and `ratchet fork`: evaluate a policy or an endpoint, also from the middle of a rollout."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.console import answered_by, print_json, print_table, say
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.errors import ConfigError

Temperatures = Annotated[list[float] | None, typer.Option(min=0, max=100, help="0 is greedy. Repeatable. Default: 1.")]
Samples = Annotated[
    int, typer.Option(min=1, max=LARGEST_INTEGER, help="Rollouts of each task at each temperature above 0.")
]
Body = Annotated[
    str | None, typer.Option(help="JSON fields that each request to the endpoint has besides; null leaves one out.")
]
Tokens = Annotated[bool, typer.Option("--tokens", help="Store its answers as tokens of the config's model, for `sft`.")]


def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            help="A config file, RUN, RUN@STEP, or with --config: a model directory or an endpoint's http address."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Tasks, agent, limits for a model or an endpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="The endpoint's name of the model.")] = None,
    key: Annotated[str | None, typer.Option(help="Reference to its API key, such as '${OPENAI_API_KEY}'.")] = None,
    body: Body = None,
    tokens: Tokens = False,
    dataset: Annotated[list[Path] | None, typer.Option(help="Evaluate these tasks instead. Repeatable.")] = None,
    temperature: Temperatures = None,
    samples: Samples = 1,
    new: Annotated[bool, typer.Option("--new", help="Do not continue an unfinished one with equal settings.")] = False,
    engine_set: Annotated[str | None, typer.Option(help="Use engines of this set, not the config's.")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Compare two evaluations, RUN:LABEL each, task by task.")
    ] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Evaluate held-out tasks: pass@k and pass^k with 95% intervals over tasks, by dataset and by family.

    RUN: an open run is evaluated with its own tasks at its next step boundary, and trains no step meanwhile.

    RUN@STEP, of a run that has ended, and all others: a run of zero steps is started. If the command is cut, the same
    command goes on with what has no verdict. Rollouts without a verdict are counted, not failures.

    Endpoint: any server with OpenAI's Chat Completions, such as https://api.openai.com/v1. `ratchet train --from-store`
    can train its solved rollouts if --tokens is given. Calls wait while it is away or busy. The key is looked up by
    adapter and workers in secrets.env of the state directory, or in their environment.
    """
    from client import Client

    client = Client()
    if compare is not None:
        found = client.compare(*compare)
        print_json(found) if json else _print_comparison(found)
        return
    if what is None:
        raise ConfigError("name what to evaluate, or use --compare")
    found = client.evaluate(
        what,
        temperatures=temperature or [1.0],
        samples=samples,
        config=config,
        datasets=dataset or [],
        new=new,
        say=say,
        model=model,
        key=key,
        body=_object(body),
        engine_set=engine_set,
        tokens=tokens,
    )
    print_json(found) if json else _print_reports(found)


def fork(
    where: Annotated[str, typer.Argument(help="A rollout and the number of one of its turns.", metavar="ROLLOUT@TURN")],
    samples: Annotated[int, typer.Option("-n", "--samples", min=1, max=LARGEST_INTEGER, help="Rollouts.")] = 8,
    policy: Annotated[
        str | None, typer.Option(help="RUN@STEP or a model directory; default: what sampled the turn.")
    ] = None,
    engine_set: Annotated[str | None, typer.Option(help="Use engines of this set, not the run's.")] = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Let rollouts do again what one did before a turn, and sample from there: graded as ever, and never trained.

    Until that turn the agent gets the recorded answers, in a box of its own, and nothing is sampled. A rollout whose
    commands give other results, apart from times and temporary names, is sampled from that place on.
    """
    from client import Client

    rollout, _, turn = where.rpartition("@")
    if not rollout or not turn.isdecimal():
        raise ConfigError(f"expected ROLLOUT@TURN, such as 12@7, found {where!r}")
    found = Client().fork(rollout, int(turn), policy, samples, engine_set, say)
    if json:
        print_json(found)
        return
    _print_reports(found)
    print(f"{found['whole']} of {found['rollouts']} rollouts did again all that came before turn {turn}")


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        value = None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--body: expected a JSON object, found {text!r} ({error})") from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"--body: expected a JSON object, found {text!r}")
    return value


def _print_reports(found: dict[str, Any]) -> None:
    if found["endpoint"] is not None:
        print(f"run {found['run_id']} was {answered_by(found['endpoint'])}")
    for label, report in found["evaluations"].items():
        parts = {"all": report, **report["by_dataset"], **report["by_family"]}
        ks = list(report["pass_at_k"])
        columns = ["", "tasks", "rollouts", "no verdict", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks[1:])]
        rows = [
            [
                name,
                str(part["tasks"]),
                str(part["rollouts"]),
                str(part["without_verdict"]),
                *(_estimate(part["pass_at_k"].get(k), part["tasks"]) for k in ks),
                *(_estimate(part["pass_all_k"].get(k), part["tasks"]) for k in ks[1:]),
            ]
            for name, part in parts.items()
        ]
        print_table(f"{found['run_id']}:{label}, step {report['step']}", columns, rows)


def _estimate(found: dict[str, float] | None, num_tasks: int) -> str:
    """Return the mean and its interval, with the number of tasks if some of `num_tasks` have too few verdicts."""
    if found is None or not found["num_tasks"]:
        return ""
    over = f" ({found['num_tasks']} tasks)" if found["num_tasks"] < num_tasks else ""
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]{over}"


def _print_comparison(found: dict[str, Any]) -> None:
    difference = found["difference"]
    left_out = f"; {found['num_left_out']} without verdicts in both are left out" if found["num_left_out"] else ""
    print(f"{found['second']} - {found['first']}, paired over {difference['num_tasks']} tasks{left_out}")
    print(f"solve rate: {difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]")
    print(
        f"tasks solved more often: {found['first_better']} by {found['first']}, "
        f"{found['second_better']} by {found['second']}; {found['test']}: p = {found['p_value']:.3g}"
    )
