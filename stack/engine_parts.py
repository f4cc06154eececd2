"""The engines of the stack: how each is placed, its address, and the settings of its process."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.process import EngineSettings
from ratchet import paths
from ratchet.config import RunConfig
from ratchet.config_engines import LOCAL
from ratchet.errors import ConfigError, MachineError
from stack.gpus import usable_gpus, visible_devices
from stack.listen_addresses import ListenAddress, address_of_url, listen_address, own_hosts, require_own_addresses
from stack.parts import Stack
from stack.placement import ALLOCATOR, LEARNER, PlacedEngine, Placement, SetToPlace, engine_name, place, place_sets
from stack.serving_plan import ServingPlan, StackPlan, read_plan, serves_same
from training.service import default_workers


@dataclass(slots=True, frozen=True)
class LearnerDevices:
    """Resources of the local Ray node for the learner's ranks: variables that name them, and the number of its GPUs."""

    environment: dict[str, str]
    num_gpus: int


def place_parts(config: RunConfig) -> Placement:
    """Place the parts of a run that has this machine's GPUs alone. Raises ConfigError if they cannot be placed."""
    return place(config, default_workers(config), {LOCAL: len(usable_gpus())})


def place_plan(plan: StackPlan) -> dict[str, Placement]:
    """Return engine set → placement, with the GPUs of this machine. Raises ConfigError if two parts have the same."""
    sets = [SetToPlace(one.config, default_workers(one.config), one.gpus) for one in plan.sets.values()]
    return place_sets(sets, {LOCAL: len(usable_gpus())})


def with_gpus(plan: StackPlan) -> StackPlan:
    """Return the plan with the GPUs that each part gets and keeps. Raises ConfigError if two parts share one."""
    kept = {}
    for name, placement in place_plan(plan).items():
        gpus = {engine.name: engine.gpus for engine in placement.engines if engine.gpus}
        if plan.sets[name].config.training.gpus is None and placement.learner.get(LOCAL):
            gpus[LEARNER] = placement.learner[LOCAL]
        kept[name] = plan.sets[name].model_copy(update={"gpus": gpus})
    return plan.model_copy(update={"sets": kept})


def choose_ports(stack: Stack, plan: StackPlan, running: Collection[str]) -> None:
    """Choose the ports of the engines of a plan before it is written. `running`: engines that listen already. Raises
    ConfigError if two engines of any sets have the same host and port, also if they name the host differently."""
    used = {name: stack.ports[name] for name in running if name in stack.ports}
    stack.refresh_ports(plan.model_dump(mode="json"))
    stack.ports |= used
    own = own_hosts()
    placed = [engine for placement in place_plan(plan).values() for engine in placement.engines]
    require_own_addresses({engine.name: _listens_at(stack, engine, own) for engine in placed})


def engine_addresses(stack: Stack) -> dict[str, str]:
    """Return engine part -> its URL; without a plan that of the first engine."""
    if not stack.plan_path.is_file():
        return {"engine": f"http://127.0.0.1:{stack.ports['engine']}"}
    placed = [engine for placement in place_plan(read_plan(stack)).values() for engine in placement.engines]
    return {engine.name: engine.address or f"http://{_host(engine)}:{_port(stack, engine)}" for engine in placed}


def _listens_at(stack: Stack, engine: PlacedEngine, own: Collection[str]) -> ListenAddress:
    if engine.address is not None:
        return address_of_url(engine.address, own)
    return listen_address(engine.node, _port(stack, engine), own)


def engine_settings(stack: Stack, plan: ServingPlan, engine: PlacedEngine) -> EngineSettings:
    """Return the settings of one engine's process. Raises MachineError if its node cannot reach what it needs."""
    if engine.node != LOCAL and engine.address is None:
        _require_reachable(stack, engine)
    config = plan.config
    return EngineSettings(
        **config.engine.model_dump(exclude={"args"}),
        args=[*config.engine.args, *engine.args],
        model_path=plan.model_path,
        engine_set=config.engine_set,
        host=_host(engine),
        port=_port(stack, engine),
        database_url=stack.environment()["RATCHET_DATABASE_URL"],
        # Not shared between nodes: a pid means something on its own node only.
        state_dir=stack.home if engine.node == LOCAL else stack.home / "engines" / engine.node,
        policies_root=paths.policies(),
        max_model_len=config.sampling.max_context_tokens,
        lora_rank=None if config.training.lora is None else config.training.lora.rank,
        router_replay=config.training.router_replay,
        environment=_devices(engine),
        is_attached=engine.address is not None,
    )


def learner_devices(plan: StackPlan) -> LearnerDevices | None:
    """Return what this machine's Ray node may use, which is what all learners have together: Ray gives each of its
    GPUs to one rank. None if no GPU was given to anything, and Ray finds none either."""
    if not usable_gpus():
        return None
    placements = place_plan(plan)
    gpus = _learners(placements).get(LOCAL, ())
    tightest = max(placements.values(), key=lambda placement: placement.engine_share)
    return LearnerDevices(visible_devices(gpus) | tightest.rank_variables, len(gpus))


def _learners(placements: Mapping[str, Placement]) -> dict[str, tuple[int, ...]]:
    """Return node → GPUs of the learners of all sets."""
    found: dict[str, set[int]] = {}
    for placement in placements.values():
        for node, gpus in placement.learner.items():
            found.setdefault(node, set()).update(gpus)
    return {node: tuple(sorted(gpus)) for node, gpus in found.items()}


def replaced_parts(before: StackPlan, after: StackPlan) -> list[str]:
    """Return the parts that run under `before`, and under `after` serve something else, elsewhere, or not at all."""
    new = place_plan(after)
    try:
        old = place_plan(before)
    except ConfigError:  # the machine has other GPUs than those that were planned
        of_set = {name: sum(entry.count for entry in one.config.engines) for name, one in before.sets.items()}
        return [engine_name(at + 1, name) for name, count in of_set.items() for at in range(count)] + ["ray"]
    found = []
    for name, placement in old.items():
        is_kept = name in after.sets and serves_same(before.sets[name], after.sets[name])
        kept = set(new[name].engines) if is_kept else set()
        found += [engine.name for engine in placement.engines if engine not in kept]
    return found + (["ray"] if _learners(old) != _learners(new) else [])


def _host(engine: PlacedEngine) -> str:
    return "127.0.0.1" if engine.node == LOCAL else engine.node


def _port(stack: Stack, engine: PlacedEngine) -> int:
    if engine.address is not None:
        return address_of_url(engine.address).port
    return engine.port if engine.port is not None else stack.ports[engine.name]


def _devices(engine: PlacedEngine) -> dict[str, str]:
    if not engine.gpus:
        return {}
    # The variables of its Ray node may limit the memory of ranks.
    own = {} if engine.node == LOCAL else {ALLOCATOR: os.environ.get(ALLOCATOR, "")}
    return visible_devices(engine.gpus, engine.node == LOCAL) | own


def _require_reachable(stack: Stack, engine: PlacedEngine) -> None:
    for name, what in (("RAY_ADDRESS", "the Ray cluster"), ("RATCHET_DATABASE_URL", "the Postgres server")):
        if not stack.is_external(name) and not (name == "RATCHET_DATABASE_URL" and stack.postgres_hosts):
            raise MachineError(
                f"{engine.name} is placed on {engine.node}, so {name} must name {what} that this node belongs to or "
                "can reach; this stack's own listens on 127.0.0.1 only"
            )
