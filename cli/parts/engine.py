"""`ratchet part engine`: run one vLLM server and supervise it."""

import asyncio
from typing import Annotated

import typer

from ratchet import paths
from ratchet.bounded_numbers import LARGEST_INTEGER
from ratchet.config_engines import DEFAULT_SET, LOCAL
from stack.parts import Stack
from stack.serving_plan import load_plan


def engine(
    number: Annotated[int, typer.Option(min=1, max=LARGEST_INTEGER, help="Which of the config's engines, from 1.")] = 1,
    engine_set: Annotated[str, typer.Option("--set", help="The engine set of the config.")] = DEFAULT_SET,
) -> None:
    """Run vLLM on the newest published policy and keep its registration and weights current."""
    from engine.ray_engine import run_engine_on_node
    from engine.wrapper import run_engine
    from ratchet.errors import MachineError
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
