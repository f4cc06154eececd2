"""The command `ratchet`: one file per command, heavy imports inside the commands.

Why here: an error becomes one sentence and an exit code in this one place.
Called by: the console script and `python -m cli.main`, which is how the supervisor starts parts.
"""

import atexit
import os
import sys
from typing import NoReturn

import typer

from cli import (
    agents,
    bench,
    checkpoints,
    config,
    doctor,
    down,
    env,
    export,
    forks,
    images,
    logs,
    regrade,
    rollout,
    rollouts,
    runs,
    sandboxes,
    setup,
    show,
    status,
    sweep,
    tasks,
    tiny_policy,
    train,
    up,
)
from cli.parts import adapter, egress, engine, gateway, learner, postgres, ray, temporal, worker
from ratchet.errors import RatchetError, UserError

app = typer.Typer(
    help="Durable reinforcement learning for coding agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

for command in (
    train,
    rollout,
    up,
    down,
    status,
    doctor,
    logs,
    env,
    runs,
    rollouts,
    show,
    tiny_policy,
    sweep,
    bench,
    setup,
    config,
    regrade,
    export,
    forks,
):
    app.command(name=command.__name__.rsplit(".", 1)[-1].replace("_", "-"), rich_help_panel="Commands")(command.command)
for group in (tasks, agents, images, sandboxes, checkpoints):
    app.add_typer(group.app, name=group.__name__.rsplit(".", 1)[-1], rich_help_panel="Commands")
for part in (postgres, temporal, gateway, ray, engine, adapter, egress, learner, worker):
    app.command(name=part.__name__.rsplit(".", 1)[-1], rich_help_panel="Parts of the stack (the supervisor runs them)")(
        part.command
    )


def main() -> NoReturn:
    """Runs one command and leaves without taking the interpreter apart.

    Threads of Temporal's SDK outlive the event loop and abort a process (exit code 134) that they find half dismantled:
    temporalio/sdk-python#300. What was registered to run at exit runs first.
    """
    code = run()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run() -> int:
    """One command's exit code: 2 for an error of the user's, 1 for one of ours that has a name; either is said in one sentence."""
    try:
        app()
    except UserError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 2
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    main()
