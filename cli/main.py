"""The command `ratchet`: registers the commands and turns errors into one sentence and an exit code.

The supervisor starts the parts of the stack with `python -P -m cli.main part NAME`. Commands import heavy packages
inside their functions, so that `--help` stays fast.
"""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import structlog
import typer
from typer.core import TyperGroup

from cli import (
    admin,
    chat,
    doctor,
    down,
    evaluate,
    explain,
    launch,
    models,
    recall,
    show,
    sql,
    status,
    steer,
    tasks,
    train,
    up,
    view,
    watch,
)
from cli.help_text import unwrap_help
from cli.parts import adapter, ray, services
from ratchet.errors import RatchetError
from ratchet.logs import configure_logs, is_json
from ratchet.machine_faults import describe_refusal, is_machine_fault
from ratchet.start_variables import start_variables, uses_huge_pages


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"ratchet {version('ratchet-rl')}")
        raise typer.Exit


COMMANDS = {
    "Run": (train.train, launch.launch_command, evaluate.evaluate, evaluate.fork, chat.chat),
    "Look": (status.status, watch.watch, show.show_app, explain.explain, sql.sql, view.view, view.publish),
    "Steer": (steer.pause, steer.resume, steer.stop, steer.set, steer.retry, recall.recall),
    "Tasks and models": (tasks.tasks_app, models.models_app),
    "Machine": (up.up, down.down, doctor.doctor, admin.admin_app),
}
"""Commands and groups by the panel of `ratchet --help` that shows them."""


class _InPanels(TyperGroup):
    """A group whose help shows commands and groups in the order of COMMANDS, instead of all commands first."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = {panel: number for number, panel in enumerate(COMMANDS)}
        panel_of = {name: getattr(one, "rich_help_panel", None) for name, one in self.commands.items()}
        return sorted(self.commands, key=lambda name: order.get(str(panel_of[name]), len(order)))


app = typer.Typer(
    cls=_InPanels,
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


def logging_part(part: Callable[..., None]) -> Callable[..., None]:
    """Return the command of a part, which sets the log up first. With text, `run_app` prints errors."""

    @functools.wraps(part)
    def run(*args: Any, **kwargs: Any) -> None:
        configure_logs(part.__name__.replace("_", "-"))
        if not is_json():
            return part(*args, **kwargs)
        try:
            part(*args, **kwargs)
        except RatchetError as error:
            structlog.get_logger().error(f"ratchet: {error}")
            raise SystemExit(error.cli_exit_code) from None
        except Exception:
            structlog.get_logger().exception("the part has failed")
            raise SystemExit(1) from None

    return run


PARTS = (
    services.postgres,
    services.temporal,
    services.temporal_ui,
    services.gateway,
    ray.ray,
    services.engine,
    adapter.adapter,
    services.egress,
    services.learner,
    services.worker,
    services.watcher,
    services.viewer,
)

VIME = (train.train, launch.launch_command)
"""Commands that take arguments of vime's training command, too."""

COMPUTING = (("train",), ("up",), ("launch",), ("tasks", "run"), ("models", "tiny-policy"), ("admin", "bench"))
"""Beginnings of the arguments of commands that compute with large tensors in their own process."""

for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
            continue
        name = command.__name__.removesuffix("_command")
        # What an argument of vime means, the command itself finds out (`ratchet/vime_names.py`).
        context = {"allow_extra_args": True, "ignore_unknown_options": True} if command in VIME else None
        app.command(name=name, rich_help_panel=panel, context_settings=context)(command)
part_app = typer.Typer(name="part", help="Run one part of the stack in this process.", no_args_is_help=True)
for part in PARTS:
    part_app.command()(logging_part(part))
app.add_typer(part_app, hidden=True)
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
    model starts again, since malloc has read its own already."""
    before = uses_huge_pages(os.environ)
    os.environ |= start_variables(os.environ)
    if (
        any(tuple(sys.argv[1 : 1 + len(words)]) == words for words in COMPUTING)
        and uses_huge_pages(os.environ) != before
    ):
        os.execv(sys.executable, sys.orig_argv)


def _open_closed_streams() -> None:
    """Let a command that was started without a standard stream, as by `>&-`, write to nowhere. It opens the lowest free
    descriptor, so that no other file gets that of the stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _report(error: OSError) -> int:
    """Print as one sentence what this machine refuses, such as a full disk or a missing right; return the exit code."""
    with contextlib.suppress(OSError):
        print(f"ratchet: this machine {describe_refusal(error)}", file=sys.stderr)
    return 1


def run_app() -> int:
    """Return the exit code. A RatchetError is printed as one sentence."""
    try:
        app()
    except RatchetError as error:
        print(f"ratchet: {error}", file=sys.stderr)
        return error.cli_exit_code
    except OSError as error:
        # Only a traceback says what is wrong if the error names no file, and the machine is not to blame.
        is_bug = error.filename is None and not isinstance(error, PermissionError) and not is_machine_fault(error)
        if sys.argv[1:2] == ["part"] or is_bug:  # the log of a part has the traceback
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
    except Exception as error:
        service = sys.modules.get("temporalio.service")  # loaded by the commands that use it
        if service is None or not isinstance(error, service.RPCError) or sys.argv[1:2] == ["part"]:
            raise
        words = " ".join(error.message.split())
        print(f"ratchet: Temporal: {words}; repeat the command; `ratchet status` shows its state", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()
