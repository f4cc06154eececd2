"""`ratchet launch`: bring up Ray on a cluster, train there, and end what was started."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.up import DEFAULT_CONFIG

if TYPE_CHECKING:
    from ratchet.config import RunConfig
    from stack.cluster import Cluster
    from stack.parts import Stack


def launch_command(
    context: typer.Context,
    cluster: Annotated[
        Path, typer.Argument(envvar="HOSTFILE", help="A cluster's YAML file, or a host file: one IP address per line.")
    ],
    config: Annotated[Path, typer.Option("--config", help="The run's YAML file.")] = DEFAULT_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Print placement and size; start nothing.")] = False,
) -> None:
    """Train on a cluster: Ray on this machine and, over ssh, on every host; engines and learner as the config says.

    Writes runs/<EXP_TAG>_<STAMP>/run.log and a file per graded rollout. When the run has ended, or on Ctrl-C or
    SIGTERM, everything that this command has started is ended; the same command continues the run. Arguments of vime's
    training command may follow (docs/vime.md).
    """
    import contextlib

    from ratchet.config_sources import load_config
    from ratchet.vime_names import dump_pattern, value_of
    from stack.box_host import box_host
    from stack.cluster import read_cluster, require_hosts
    from stack.follow_run import run_name
    from stack.gpus import usable_gpus
    from stack.learner_models import LearnerModels
    from stack.parts import Stack
    from stack.placement import place
    from stack.ray_nodes import ray_nodes
    from stack.run_size import describe_run
    from training.service import default_workers

    arguments = list(context.args)
    if str(cluster).startswith("--") and os.environ.get("HOSTFILE"):  # the first of vime's arguments, not the cluster
        arguments, cluster = [str(cluster), *arguments], Path(os.environ["HOSTFILE"])
    pattern = dump_pattern(arguments)
    hosts, resolved = read_cluster(cluster), load_config(config, set or [], arguments=arguments)
    require_hosts(hosts, resolved)
    num_gpus = hosts.num_gpus(len(usable_gpus()))
    placement = place(resolved, default_workers(resolved), num_gpus)
    for line in describe_run(LearnerModels(resolved), placement, num_gpus):
        print(line)
    _require_reachable(hosts)
    if check:
        return
    name = run_name(config)
    directory = Path("runs") / f"{name}_{value_of('STAMP') or time.strftime('%Y%m%d_%H%M%S')}"
    say = _Log(directory / "run.log")
    say(f"log and dumps: {directory}")
    _end_in_order()
    if hosts.ray_hosts:
        os.environ["RAY_ADDRESS"] = hosts.ray_address
    with contextlib.ExitStack() as started:
        started.enter_context(box_host(hosts, Stack(), directory, say))
        if hosts.ray_hosts:
            started.enter_context(ray_nodes(hosts, placement, say))
        _train(resolved, name, pattern or str(directory / "rollout_dumps" / "rollout_{rollout_id}.json"), say)


class _Log:
    """Progress on stderr and in the log."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def __call__(self, text: str) -> None:
        from cli.console import say

        say(text)
        with self.path.open("a") as file:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=file)


def _require_reachable(cluster: "Cluster") -> None:
    """Raise MachineError if workers would be told of a Postgres that they cannot reach, or if the stack is up."""
    from ratchet.errors import MachineError
    from stack.parts import Stack
    from stack.supervisor import Supervisor

    stack = Stack()
    if cluster.hosts and Supervisor(stack).is_up():
        raise MachineError(
            f"the stack in {stack.home} is up, with another Ray than that of this launch: `ratchet down` first"
        )
    if cluster.ray_hosts and not stack.is_external("RATCHET_DATABASE_URL"):
        raise MachineError(
            "learner and engines on other hosts need Postgres, and this stack's own listens on 127.0.0.1 only: set "
            "RATCHET_DATABASE_URL to a server that every host reaches (docs/fleet.md)"
        )


def _end_in_order() -> None:
    """Take SIGTERM, which a batch system sends before its time limit, for Ctrl-C."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _end_undisturbed() -> None:
    """Ignore SIGTERM from now on, since what was started is being ended."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _train(config: "RunConfig", name: str, pattern: str, say: Any) -> None:
    """Bring up the stack and follow the run; end the stack if it was not up before."""
    import asyncio

    from cli.console import print_json
    from stack.agent_programs import provide_program
    from stack.follow_run import collect_result, start_run
    from stack.parts import Stack
    from stack.startup import bring_up
    from stack.supervisor import Supervisor

    stack = Stack()
    supervisor = Supervisor(stack)
    was_up = supervisor.is_up()
    try:
        provide_program(config.harness.name, stack.has_gateway, say)
        bring_up(stack, config, say, for_run=True)
        run_id = asyncio.run(start_run(stack, config, name, False, say))
        say(f"run {run_id}: {stack.workflow_page(f'run/{run_id}')}")
        asyncio.run(_follow(stack, run_id, pattern, say))
        print_json(asyncio.run(collect_result(stack, run_id)))
    except KeyboardInterrupt:
        _end_undisturbed()
        say("ending; the same command continues the run")
        raise typer.Exit(130) from None
    finally:
        if not was_up:
            supervisor.down()


async def _follow(stack: "Stack", run_id: str, pattern: str, say: Any) -> None:
    from stack.follow_run import watch_run
    from stack.rollout_dumps import dumping

    async with dumping(stack, run_id, pattern, say):
        await watch_run(stack, run_id, say)
        _end_undisturbed()
