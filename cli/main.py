"""The command `ratchet`: registers one file per command and turns errors into one sentence and an exit code.

The supervisor starts the parts of the stack with `python -P -m cli.main PART`. Commands import heavy packages inside
their functions, so that `--help` stays fast.
"""

import atexit
import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

from cli import (
    advise,
    agents,
    backup,
    bench,
    cancel,
    checkpoints,
    codec_server,
    config,
    doctor,
    down,
    drain,
    env,
    evaluate,
    explain,
    export,
    extend,
    forks,
    groups,
    images,
    launch,
    logs,
    mcp,
    mix,
    models,
    pause,
    prune,
    regrade,
    restore,
    resume,
    retry,
    rollout,
    rollouts,
    runs,
    sandboxes,
    set,
    setup,
    show,
    skip_step,
    sql,
    status,
    steering,
    stop,
    sweep,
    tail,
    tasks,
    tiny_policy,
    top,
    train,
    up,
    view,
    watch,
    why,
)
from cli.help_text import unwrap_help
from cli.part_process import logging_part
from cli.parts import adapter, egress, engine, gateway, learner, postgres, ray, temporal, viewer, watcher, worker
from ratchet.errors import RatchetError
from ratchet.machine_faults import describe_refusal, is_machine_fault
from ratchet.start_variables import start_variables, uses_huge_pages


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ratchet {version('ratchet-rl')}")
        raise typer.Exit


app = typer.Typer(
    help="Durable reinforcement learning for coding agents.",
    epilog="Exit codes: 0 done; 1 something failed that may work later; 2 a mistake in what was asked, a refusal, or "
    "something that this machine lacks, such as a running stack.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable reinforcement learning for coding agents."""


COMMANDS = (
    train.train,
    launch.launch_command,
    pause.pause,
    resume.resume,
    drain.drain_command,
    stop.stop,
    skip_step.skip_step,
    extend.extend,
    set.set,
    steering.steering,
    cancel.cancel,
    retry.retry,
    evaluate.evaluate,
    advise.advise,
    rollout.rollout,
    up.up,
    down.down,
    status.status,
    doctor.doctor,
    logs.logs,
    env.env,
    runs.runs,
    watch.watch,
    mix.mix,
    view.view,
    why.why,
    top.top,
    groups.groups,
    rollouts.rollouts,
    tail.tail,
    show.show,
    explain.explain,
    sql.sql,
    mcp.mcp,
    tiny_policy.make_tiny_policy_command,
    sweep.sweep,
    bench.bench,
    setup.setup,
    config.config,
    codec_server.codec_server,
    regrade.regrade,
    export.export,
    forks.forks,
    backup.backup,
    restore.restore,
    prune.prune,
)
GROUPS = (
    tasks.tasks_app,
    agents.agents_app,
    images.images_app,
    sandboxes.sandboxes_app,
    checkpoints.checkpoints_app,
    models.models_app,
)
PARTS = (
    postgres.postgres,
    temporal.temporal,
    temporal.temporal_ui,
    gateway.gateway,
    ray.ray,
    engine.engine,
    adapter.adapter,
    egress.egress,
    learner.learner,
    worker.worker,
    watcher.watcher,
    viewer.viewer,
)

VIME = (train.train, launch.launch_command)
"""Commands that take arguments of vime's training command, too."""

COMPUTING = (["train"], ["up"], ["launch"], ["rollout"], ["tiny-policy"], ["bench"])
"""Beginnings of the arguments of commands that compute with large tensors in their own process."""

for function in COMMANDS:
    name = function.__module__.rsplit(".", 1)[-1].replace("_", "-")
    # What an argument of vime means, the command itself finds out (`ratchet/vime_names.py`).
    context = {"allow_extra_args": True, "ignore_unknown_options": True} if function in VIME else None
    app.command(name=name, rich_help_panel="Commands", context_settings=context)(function)
for group in GROUPS:
    app.add_typer(group, rich_help_panel="Commands")
for function in PARTS:
    app.command(rich_help_panel="Parts of the stack (the supervisor runs them)")(logging_part(function))
unwrap_help(app)


def main() -> NoReturn:
    """Run one command and exit without finalising the interpreter.

    Threads of Temporal's SDK outlive the event loop and abort the process (exit code 134) if they run while the
    interpreter is finalised: temporalio/sdk-python#300. Functions registered with atexit run first.
    """
    _set_start_variables()
    _open_closed_streams()
    code = run_app()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _report(error) if code == 0 else code
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _set_start_variables() -> None:
    """Set them for this process and those that it starts. A command that may train a tiny policy or a benchmark's
    model starts again, since malloc has read its own already.
    """
    before = uses_huge_pages(os.environ)
    os.environ |= start_variables(os.environ)
    if sys.argv[1:2] in COMPUTING and uses_huge_pages(os.environ) != before:
        os.execv(sys.executable, sys.orig_argv)


def _open_closed_streams() -> None:
    """Let a command that was started without a standard stream, as by `>&-`, write to nowhere. It opens the lowest free
    descriptor, so that no other file gets that of the stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _report(error: OSError) -> int:
    """Print what this machine refuses, as one sentence: a full or read-only disk, a missing right, a connection. Return
    the exit code.
    """
    with contextlib.suppress(OSError):
        print(f"ratchet: this machine {describe_refusal(error)}", file=sys.stderr)
    return 1


def _is_bug(error: OSError) -> bool:
    """Return whether only a traceback says what is wrong: the error names no file, and the machine is not to blame."""
    return error.filename is None and not isinstance(error, PermissionError) and not is_machine_fault(error)


def run_app() -> int:
    """Return the exit code. A RatchetError is printed as one sentence."""
    try:
        app()
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return error.cli_exit_code
    except OSError as error:
        is_part = sys.argv[1:2] in [[part.__name__.replace("_", "-")] for part in PARTS]
        if is_part or _is_bug(error):  # the log of a part has the traceback
            raise
        return _report(error)
    except ValueError as error:
        from pydantic import ValidationError

        if not isinstance(error, ValidationError):
            raise
        first = error.errors()[0]  # an option's value that no workflow takes
        print(
            f"ratchet: {'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}", file=sys.stderr
        )
        return 2
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    main()
