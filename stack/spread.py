"""Give the hosts of a launch their parts: ask each for its GPUs, and place what the run's config does not place."""

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ratchet.config import PlacedEnginesConfig, RunConfig
from ratchet.config_engines import LOCAL
from ratchet.errors import ConfigError, MachineError
from stack.cluster import Cluster
from stack.host_process import ssh_login
from stack.placement import gpus_per_engine, place

_ASK = "if command -v nvidia-smi >/dev/null; then nvidia-smi -L; fi"
_ASK_SECONDS = 60.0
_Gpus = dict[str, list[int]]
"""Node → indexes of its GPUs."""


def with_gpus(cluster: Cluster) -> Cluster:
    """Return the cluster with the number of GPUs of each of Ray's hosts; those that the file does not give are asked
    for over ssh. Raises MachineError, naming the host, if one does not answer.
    """
    unknown = [address for address in cluster.ray_hosts if cluster.hosts[address].gpus is None]
    with ThreadPoolExecutor(max(1, len(unknown))) as pool:
        found = dict(zip(unknown, pool.map(lambda address: _ask(cluster, address), unknown), strict=True))
    asked = {address: cluster.hosts[address].model_copy(update={"gpus": gpus}) for address, gpus in found.items()}
    return cluster.model_copy(update={"hosts": cluster.hosts | asked})


def _ask(cluster: Cluster, host: str) -> int:
    command = [*ssh_login(cluster, host, ["-o", "ConnectTimeout=15"]), _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
        words = "" if done.returncode == 0 else done.stderr.strip()[-200:] or f"status {done.returncode}"
    except subprocess.TimeoutExpired:
        words = f"no answer within {_ASK_SECONDS:.0f} s"
    if words:
        raise MachineError(
            f"host {host} does not say how many GPUs it has ({words}); see that `ssh {command[-2]} nvidia-smi -L` "
            "works without a password, or write slots=N behind its address"
        )
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def is_placed(config: RunConfig) -> bool:
    """Return whether the config itself places both engines and learner."""
    return "engines" in config.model_fields_set and config.training.gpus is not None


def spread(config: RunConfig, num_gpus: Mapping[str, int], engine_gpus: int | None = None) -> RunConfig:
    """Return the config with a place for engines and learner on these nodes, if it has none. `num_gpus`: node → number
    of its GPUs. `engine_gpus`: of all engines together; None for half of the GPUs, or all if nothing is trained.

    Engines take the last nodes, the learner what is left; where there is no GPU at all, each host has one engine. What
    the config places stays. Raises ConfigError if a part would get nothing.
    """
    free = {node: list(range(number)) for node, number in num_gpus.items()}
    if "engines" in config.model_fields_set:
        engines = config.engines
        alone = config.model_copy(update={"training": config.training.model_copy(update={"steps": 0, "gpus": None})})
        taken = [(engine.node, engine.gpus) for engine in place(alone, 0, num_gpus).engines]
        free = {node: [gpu for gpu in gpus if (node, gpu) not in _pairs(taken)] for node, gpus in free.items()}
    elif not any(num_gpus.values()):
        engines = tuple(PlacedEnginesConfig(host=node) for node in num_gpus if node != LOCAL)
    else:
        named = [(node, tuple(gpus)) for node, gpus in (config.training.gpus or {}).items()]
        free = {node: [gpu for gpu in gpus if (node, gpu) not in _pairs(named)] for node, gpus in free.items()}
        engines = _engines(config, free, engine_gpus)
    training = config.training
    if training.gpus is None and training.steps and any(num_gpus.values()):
        training = training.model_copy(update={"gpus": {node: gpus for node, gpus in free.items() if gpus}})
        if not training.gpus:
            raise ConfigError(
                f"the engines take all {sum(num_gpus.values())} GPUs, and the learner needs some of its own; lower "
                "--engine-gpus, engines.count or --tensor-parallel-size in engine.args, or add hosts"
            )
    return config.model_copy(update={"engines": engines, "training": training})


def _pairs(taken: list[tuple[str, tuple[int, ...]]]) -> set[tuple[str, int]]:
    return {(node, gpu) for node, gpus in taken for gpu in gpus}


def _engines(config: RunConfig, free: _Gpus, engine_gpus: int | None) -> tuple[PlacedEnginesConfig, ...]:
    """Return an entry per node with engines, whose GPUs are taken out of `free`."""
    each = gpus_per_engine(config.engine.args)
    is_split = config.training.steps > 0 and config.training.gpus is None
    total = sum(map(len, free.values()))
    wanted = engine_gpus if engine_gpus is not None else max(each, total // 2 if is_split else total)
    found: list[PlacedEnginesConfig] = []
    for node in reversed(free):
        count = min(len(free[node]), wanted) // each
        if count:
            found.insert(0, PlacedEnginesConfig(host=node, count=count, gpus=free[node][-count * each :]))
            free[node] = free[node][: -count * each]
            wanted -= count * each
    if not found:
        raise ConfigError(
            f"no host has {each} free GPUs for one engine (tensor x pipeline x data parallel of engine.args, "
            f"--engine-gpus {engine_gpus if engine_gpus is not None else 'unset'}): "
            + ", ".join(f"{node} has {len(gpus)}" for node, gpus in free.items())
        )
    return tuple(found)
