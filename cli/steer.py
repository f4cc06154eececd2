"""`ratchet pause`, `resume`, `stop`, `set` and `retry`: requests to a run, or to a part of it. Each returns at once."""

from typing import Annotated

import typer

from cli.console import say
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.config_sources import dotted_values
from ratchet.errors import ConfigError

_PARTS = "a rollout's number, or a workflow: group/RUN/3, rollout/RUN/3/0, evaluate/RUN/start-t1."

Run = Annotated[str, typer.Argument(help="A run of `ratchet show runs`.", metavar="RUN")]
Reason = Annotated[str, typer.Option("--reason", "-m", help="Why; kept with the request.")]


def pause(run: Run, reason: Reason = "") -> None:
    """Pause a run: no group, step or evaluation is started until `ratchet resume`.

    Rollouts in flight, the learner's step and an evaluation that has begun, with all its rollouts, go on to their end;
    `ratchet stop evaluate/RUN/LABEL` ends that with the verdicts that it has.
    """
    from client import Client

    say(Client().run(run).pause(reason).text)


def resume(
    run: Run,
    skip_step: Annotated[
        bool,
        typer.Option("--skip-step", help="Discard the batch of the next step first. The run must be paused; needs -m."),
    ] = False,
    reason: Reason = "",
) -> None:
    """Let a paused, stopped, failed or cancelled run go on from its newest checkpoint.

    Mend first what stopped it: `ratchet show runs` shows the reason. A run that is to drain or to stop goes on, too.

    --skip-step discards a batch that cannot be trained, for example one whose gradient is not finite. Its groups are
    never trained on. The step is planned from other groups; the learner starts anew at its newest checkpoint for that,
    and trains the steps since then once more, with the same batches. If the run cannot go on yet, the batch is
    discarded all the same, and `ratchet resume` without it goes on later.
    """
    from client import Client

    found = Client().run(run)
    if skip_step:
        if not reason:
            raise ConfigError("--skip-step needs a reason: -m 'why its batch cannot be trained'")
        say(found.skip_step(reason).text)
    say(found.resume(reason).text)


def stop(
    what: Annotated[str, typer.Argument(help=f"A run of `ratchet show runs`, {_PARTS}", metavar="WHAT")],
    drain: Annotated[
        bool, typer.Option("--drain", help="Of a run: train first what is in flight, and cancel nothing.")
    ] = False,
    now: Annotated[bool, typer.Option("--now", help="Of a run: end an evaluation in progress, too.")] = False,
    reason: Reason = "",
) -> None:
    """End a run after the step that is planned, with a checkpoint; or cancel a group, a rollout or an evaluation.

    Of a run: rollouts in flight are cancelled. An evaluation that runs ends first, unless --now ends it with the
    verdicts that it has (`ratchet retry evaluate/RUN/LABEL` runs the rest later). A paused run ends after its newest
    trained step; stop it again if it was paused after the first request. The run is then `stopped`; `ratchet resume`
    lets it go on.

    With --drain no new groups are started, and the run ends when those in flight are trained, or will never be. Its
    last step may be smaller than the others. `ratchet resume` takes the wish back, also later.

    Of a group, a rollout or an evaluation: it is cancelled, and its boxes are released. The run makes another group or
    rollout. An evaluation ends with the verdicts that it has, and the run goes on.
    """
    from client import Client
    from ratchet.run_names import is_part_of_run

    client = Client()
    if is_part_of_run(what):
        if drain or now:
            raise ConfigError(f"--drain and --now are for runs; {what!r} is cancelled at once")
        say(client.cancel(what, reason).text)
    elif drain and now:
        raise ConfigError("--drain trains what is in flight, --now does not wait; use one of them")
    elif drain:
        say(client.run(what).drain(reason).text)
    else:
        say(client.run(what).stop(reason, now).text)


def set(
    run: Run,
    changes: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE, as in the config.", metavar="KEY=VALUE")
    ] = None,
    add_steps: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_INTEGER, help="Add so many steps to the run.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Change config values of a run, all or none, from the next decision on: staleness, boxes, groups a step, learning
    rate, temperature, evaluations. Also adds steps, by a request of its own.

    A step is trained with the values of its plan row, so a replay trains the same. A key that may not change is
    refused with the reason; `ratchet show requests RUN` lists what was changed. A run that has ended goes on from its
    newest checkpoint when steps are added.
    """
    from client import Client

    if not changes and add_steps is None:
        raise ConfigError(f"name what to change of {run}: KEY=VALUE, or --add-steps")
    values = dotted_values(changes or [])
    found = Client().run(run)
    if values:
        say(found.set(values, reason).text)
    if add_steps is not None:
        say(found.extend(add_steps, reason).text)


def retry(
    what: Annotated[str, typer.Argument(help=_PARTS[0].upper() + _PARTS[1:])],
    stage: Annotated[
        str | None, typer.Option(help="Try this pending stage of the rollout now, such as boot or grade.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Run a rollout, or the members of a group, again that ended without a verdict, beyond the run's replacements.

    What has a verdict is judged again by `ratchet tasks regrade`. A group that is cancelled, or that a step has used,
    is not run again: the run makes other ones by itself. A rollout of an evaluation is retried with its evaluation,
    which runs all again that has no verdict, as long as its run is at the same step; a run that has ended is open
    meanwhile, and trains no further step. A rollout by hand is made anew by `ratchet tasks run`.

    What cannot be retried is refused with the reason and exit code 2.
    """
    from client import Client

    say(Client().retry(what, stage, reason).text)
