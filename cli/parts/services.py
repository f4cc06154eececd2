"""`ratchet part NAME`: the parts that run one service in this process, with what the stack says of its place."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from cli.view import viewer_settings
from ratchet import paths
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.config_engines import DEFAULT_SET, LOCAL
from ratchet.errors import ConfigError, MachineError
from ratchet.temporal_settings import QUEUES, QUEUES_VARIABLE, load_temporal_settings
from sandboxes.docker_settings import adapter_address
from stack import temporal_server
from stack.parts import Stack
from stack.postgres import run_postgres
from stack.serving_plan import load_plan
from stack.temporal_server import run_temporal_ui


def postgres() -> None:
    """Run the embedded Postgres on the state directory."""
    stack = Stack()
    max_connections = load_temporal_settings().postgres.max_connections
    run_postgres(stack.home / "postgres", stack.ports["postgres"], max_connections, stack.postgres_hosts)


def temporal(
    dev: Annotated[bool, typer.Option("--dev", help="Run the dev server of Temporal's CLI, with its UI.")] = False,
) -> None:
    """Run Temporal's server on Postgres, or the dev server on a database file in the state directory."""
    stack = Stack()
    environment = stack.environment()
    if dev:
        ports = (stack.ports["temporal"], stack.ports["temporal_ui"])
        temporal_server.run_dev_server(stack.home, *ports, environment["TEMPORAL_NAMESPACE"])
    temporal_server.run_temporal_server(
        stack.ports, environment["RATCHET_DATABASE_URL"], environment["TEMPORAL_NAMESPACE"]
    )


def temporal_ui() -> None:
    """Run Temporal's web UI. The dev server brings its own."""
    stack = Stack()
    run_temporal_ui(stack.ports["temporal_ui"], stack.environment()["TEMPORAL_ADDRESS"])


def gateway(
    name: Annotated[str, typer.Option(help="This host's name among those of a launch's front.")] = "",
    front: Annotated[
        Path | None, typer.Option(help="Serve the boxes of the hosts in this JSON file: name, URL.")
    ] = None,
    lost_seconds: Annotated[
        float, typer.Option(min=60, max=LARGEST_INTEGER, help="Time without an answer until a host's boxes are gone.")
    ] = 600,
) -> None:
    """Run the local sandbox gateway, or the front of those of several hosts."""
    from activities.harnesses.agent_programs import BOX_AGENTS, agents_directory
    from sandbox_gateway import machine_probe
    from sandbox_gateway.front import create_front_app, host_tag
    from sandbox_gateway.python_layer import ensure_python_layer
    from sandbox_gateway.serve import serve_app, serve_gateway
    from sandbox_gateway.settings import GatewaySettings
    from sandboxes.e2b import image_metadata_key

    stack = Stack()
    if front is not None:
        serve_app(create_front_app(front, lost_seconds), "127.0.0.1", stack.ports["front"])
        return
    machine_probe.require_sandbox_support()
    agents_directory().mkdir(mode=0o755, parents=True, exist_ok=True)
    serve_gateway(
        GatewaySettings(
            root_directory=stack.home / "boxes" / name,
            api_key=stack.environment()["E2B_API_KEY"],
            port=stack.ports["gateway"],
            egress_ports=(int(stack.environment()["ADAPTER_PORT"]),),
            max_boxes=256,
            box_id_prefix=host_tag(name) if name else "",
            image_metadata_key=image_metadata_key(),
            images_directory=paths.images(),
            layers={"/opt/ratchet": ensure_python_layer(paths.cache()), BOX_AGENTS: agents_directory()},
            hidden_directories=(Path.cwd(), stack.home),
        )
    )


def engine(
    number: Annotated[int, typer.Option(min=1, max=LARGEST_INTEGER, help="Which of the config's engines, from 1.")] = 1,
    engine_set: Annotated[str, typer.Option("--set", help="The engine set of the config.")] = DEFAULT_SET,
) -> None:
    """Run vLLM on the newest published policy and keep its registration and weights current."""
    from engine.ray_engine import run_engine_on_node
    from engine.wrapper import run_engine
    from stack.engine_parts import engine_settings, place_plan

    stack = Stack()
    plan = load_plan(stack)
    paths.policies().mkdir(parents=True, exist_ok=True)
    if engine_set not in plan.sets:
        names = ", ".join(plan.sets)
        raise MachineError(f"engine set {engine_set!r} is not among those served ({names}); run `ratchet up CONFIG`")
    engines = place_plan(plan)[engine_set].engines
    if number > len(engines):
        raise MachineError(f"engine {number} is not among the {len(engines)} of the config; run `ratchet up CONFIG`")
    placed = engines[number - 1]
    settings = engine_settings(stack, plan.sets[engine_set], placed)
    if placed.node == LOCAL or settings.is_attached:
        asyncio.run(run_engine(settings))
    else:
        run_engine_on_node(settings, placed.node, stack.environment()["RAY_ADDRESS"])


def egress() -> None:
    """Open the adapter's port, and no other, in boxes that are containers. Runs beside the Docker daemon, as root."""
    from stack.docker_egress import DockerEgress

    # Also on a machine whose own boxes are not Docker's: a daemon's host need not be the adapter's.
    stack = Stack()
    address = adapter_address(stack.environment() | {"ADAPTER_PUBLIC_HOST": stack.adapter_host})
    asyncio.run(DockerEgress(address).run())


def learner() -> None:
    """Run the learner service, which trains every running run: it starts one driver process for each."""
    from training.service import run_learner_service

    asyncio.run(run_learner_service(Stack().environment()["RATCHET_DATABASE_URL"]))


def worker(
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Task queue. Repeat the option for several; default: RATCHET_WORKER_QUEUES, else all."),
    ] = None,
) -> None:
    """Run a worker, which polls task queues and runs workflows and activities."""
    import uvloop

    from ratchet.trace_export import start_exporting
    from stack.worker import run_worker

    queues = queue or (os.environ.get(QUEUES_VARIABLE) or ",".join(QUEUES)).split(",")
    unknown = [name for name in queues if name not in QUEUES]
    if unknown:
        raise ConfigError(f"--queue {unknown[0]}: unknown; expected one of {', '.join(QUEUES)}")
    start_exporting("worker")
    uvloop.run(run_worker(queues, load_temporal_settings(), Stack().environment()["RATCHET_DATABASE_URL"]))


def watcher() -> None:
    """Probe every part every few seconds, and restart a part that does not answer for long."""
    from stack.watcher import run_watcher

    asyncio.run(run_watcher(Stack()))


def viewer(
    host: Annotated[str, typer.Option(help="Address to listen on; without loopback, readers need a token.")] = (
        "127.0.0.1"
    ),
) -> None:
    """Serve the pages about runs and rollouts, which only read, and chats."""
    from client import Client
    from client.chat_pages import add_chats
    from viewer.app import ViewerServer

    server = ViewerServer(viewer_settings(Stack(), host))
    add_chats(server.app, Client())
    server.run()
