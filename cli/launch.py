"""`ratchet launch`: bring up Ray on a cluster, train there, and end what was started."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.console import print_json, say
from cli.down import down
from ratchet.bounded_numbers import MAX_ROWS
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError, MachineError
from ratchet.vime_names import dump_pattern, value_of
from stack.part_logs import following_logs
from stack.parts import POSTGRES_HOSTS, Stack
from stack.placement import Placement, place

if TYPE_CHECKING:
    from stack.cluster import Cluster

LAUNCHER_CONFIG = Path("configs/qwen36_35b_a3b_swe_8nodes.yaml")


def launch_command(
    context: typer.Context,
    cluster: Annotated[
        Path | None,
        typer.Argument(
            envvar="HOSTFILE",
            help="A cluster's YAML file, or a host file: one IP address per line. Default: /root/mpi_rack_hostfile.",
        ),
    ] = None,
    config: Annotated[Path, typer.Option("--config", help="The run's YAML file.")] = LAUNCHER_CONFIG,
    set: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE; overrides the file. Repeatable.")] = None,
    engine_gpus: Annotated[
        int | None,
        typer.Option("--engine-gpus", min=1, max=MAX_ROWS, help="Number of GPUs of engines alone; default: 0."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print placement and size; start nothing.")] = False,
) -> None:
    """Train on a cluster: Ray, engines and learner on this machine and, over ssh, on every host.

    Engines and learner share the GPUs, unless the config places the parts. Writes runs/<EXP_TAG>_<STAMP>/run.log, with
    all that the parts print, and a file of the rollouts of each step. When the run has ended, or on Ctrl-C or
    SIGTERM, everything that this command has started is ended; the same command continues the run. Arguments of vime's
    training command may follow (docs/vime.md).
    """
    from stack.cluster import DEFAULT_HOST_FILE, read_cluster, require_hosts
    from stack.follow_run import run_name
    from stack.gpus import usable_gpus
    from stack.spread import spread, with_gpus
    from stack.supervisor import Supervisor
    from training.service import default_workers

    arguments = list(context.args)
    if cluster is not None and str(cluster).startswith("--"):  # the first of vime's arguments, not the cluster
        named = os.environ.get("HOSTFILE")
        arguments, cluster = [str(cluster), *arguments], Path(named) if named else None
    pattern = dump_pattern(arguments)
    hosts = read_cluster(cluster or DEFAULT_HOST_FILE)
    resolved = load_config(config, set or [], arguments=arguments)
    if "engines" not in resolved.model_fields_set or resolved.training.gpus is None:
        hosts = with_gpus(hosts)
        resolved = spread(resolved, hosts.num_gpus(len(usable_gpus())), engine_gpus)
    require_hosts(hosts, resolved)
    num_gpus = hosts.num_gpus(len(usable_gpus()))
    placement = place(resolved, default_workers(resolved), num_gpus)
    print("\n".join(lines := _checked(hosts, resolved, placement, num_gpus)))
    if hosts.hosts and Supervisor(stack := Stack()).is_up():
        raise MachineError(
            f"the stack in {stack.home} is up, with another Ray than this launch's: `ratchet down` first"
        )
    if not check:
        _launch(hosts, resolved, placement, lines, run_name(config), pattern)


def _checked(cluster: "Cluster", config: RunConfig, placement: Placement, num_gpus: Mapping[str, int]) -> list[str]:
    """Check all that can be checked before anything is started, and return in words where everything goes."""
    from sandboxes.registry import sandbox_provider
    from stack.learner_models import LearnerModels
    from stack.run_size import describe_run
    from stack.startup import check_start, require_boxes

    stack = Stack()
    check_start(config, say)
    boxes = ", ".join(cluster.box_hosts) or "local"
    if not cluster.box_hosts:
        require_boxes(stack, say)
        if not stack.has_gateway:
            provider = sandbox_provider()
            boxes = getattr(provider, "url", provider.name)
    parts = [part.name for part in stack.parts() if part.name not in ("ray", "engine", "learner", "gateway")]
    lines = describe_run(LearnerModels(config), placement, num_gpus)
    return [*lines, f"on this machine: {', '.join(parts)}", f"boxes: {boxes}"]


def _launch(
    cluster: "Cluster", config: RunConfig, placement: Placement, lines: list[str], name: str, pattern: str | None
) -> None:
    """Start everything, follow the run, and end what was started. `lines`: the placement in words."""
    from stack.agent_programs import provide_program
    from stack.box_hosts import box_hosts
    from stack.ray_nodes import ray_nodes
    from training.rollout_dumps import dump_path

    _name_services(cluster)
    directory = Path("runs") / f"{name}_{value_of('STAMP') or time.strftime('%Y%m%d_%H%M%S')}"
    say = _Log(directory / "run.log")
    dumps = dump_path(pattern or str(directory / "rollout_dumps" / "rollout_{rollout_id}.pt"))
    say.write("\n".join(lines))
    say(f"log and dumps: {directory}")
    provide_program(config.harness.name, Stack().has_gateway, say)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system sends it before its time limit
    with contextlib.ExitStack() as started:
        started.enter_context(box_hosts(cluster, Stack(), say, say.part))
        if cluster.ray_hosts:
            started.enter_context(ray_nodes(cluster, placement, say, say.part))
        started.enter_context(following_logs(Stack().home / "logs", say.part))
        _train(config, name, dumps, say)


class _Log:
    """Progress on stderr and in the log, which also gets what the parts print."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def __call__(self, text: str) -> None:
        say(text)
        self.write(text)

    def part(self, name: str, line: str) -> None:
        self.write(f"[{name}] {line}")

    def write(self, text: str) -> None:
        """Add a line; a full disk loses it, and ends nothing."""
        with contextlib.suppress(OSError), self.path.open("a") as file:  # one write, so that threads do not mix theirs
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def _name_services(cluster: "Cluster") -> None:
    """Name in this process's environment, which the parts inherit, what of the head the hosts and boxes reach."""
    stack = Stack()
    if cluster.ray_hosts:
        os.environ["RAY_ADDRESS"] = cluster.ray_address
    if cluster.hosts and not stack.has_gateway:
        os.environ.setdefault("MASTER_ADDR", cluster.head)
    if cluster.ray_hosts and not stack.is_external("RATCHET_DATABASE_URL"):
        found = [str(socket.getaddrinfo(host, None)[0][4][0]) for host in (cluster.head, *cluster.hosts)]
        if found[0].startswith("127.") or found[0] == "::1":
            raise ConfigError(
                f"the head {cluster.head} has the loopback address {found[0]} here, which no other host reaches; set "
                "`head` or MASTER_ADDR to an address that the hosts reach"
            )
        os.environ[POSTGRES_HOSTS] = " ".join(found)


def _train(config: RunConfig, name: str, dumps: Path, say: _Log) -> None:
    """Bring up the stack and follow the run; end the stack if it was not up before."""
    from stack.follow_run import follow_to_end, start_run
    from stack.startup import bring_up
    from stack.supervisor import Supervisor
    from training.rollout_dumps import request_dumps

    stack = Stack()
    was_up = Supervisor(stack).is_up()
    try:
        bring_up(stack, config, say, for_run=True)
        run_id = asyncio.run(start_run(stack, config, name, False, say))
        say(f"run {run_id}: {stack.workflow_page(f'run/{run_id}')}")
        request_dumps(run_id, dumps)
        result = asyncio.run(follow_to_end(stack, run_id, say))
        print_json(result)
        say.write(str(result))
    except KeyboardInterrupt:
        say("ending; the same command continues the run")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what was started is being ended
        if not was_up:
            down(boxes=False)
