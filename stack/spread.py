"""Give the hosts of a launch their parts: ask each for its GPUs, and place what the run's config does not place."""

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from ratchet.config import PlacedEnginesConfig, RunConfig
from ratchet.config_engines import LOCAL
from ratchet.errors import MachineError
from stack.cluster import Cluster
from stack.host_process import ssh_login
from stack.placement import SHARING_ARGS, gpus_per_engine, memory_share, place

_ASK = "if command -v nvidia-smi >/dev/null; then timeout 60 nvidia-smi -L; fi"


def with_gpus(cluster: Cluster) -> Cluster:
    """Return the cluster with the number of GPUs of each of Ray's hosts; those that the file does not give are asked
    for over ssh. Raises MachineError, naming the host, if one does not answer."""
    unknown = [address for address in cluster.ray_hosts if cluster.hosts[address].gpus is None]
    with ThreadPoolExecutor() as pool:
        found = zip(unknown, pool.map(lambda address: _ask(cluster, address), unknown), strict=True)
        asked = {address: cluster.hosts[address].model_copy(update={"gpus": gpus}) for address, gpus in found}
    return cluster.model_copy(update={"hosts": cluster.hosts | asked})


def _ask(cluster: Cluster, host: str) -> int:
    command = [*ssh_login(cluster, host, ["-o", "ConnectTimeout=15"]), _ASK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(
            f"host {host} does not say how many GPUs it has ({done.stderr.strip()[-200:] or done.returncode}); see "
            f"that `ssh {command[-2]} nvidia-smi -L` works without a password, or write slots=N behind its address"
        )
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def spread(config: RunConfig, num_gpus: Mapping[str, int], engine_gpus: int | None = None) -> RunConfig:
    """Return the config with a place for engines and learner on these nodes; what it places itself stays.

    `num_gpus`: node → number of its GPUs. `engine_gpus`: of all engines together, on the last nodes, while the learner
    has the rest; None lets engines and learner share all.
    """
    training = config.training
    is_shared = engine_gpus is None and training.gpus is None and training.steps > 0
    if "engines" in config.model_fields_set:
        is_shared = False
    else:
        config = config.model_copy(update={"engines": _engines(config, num_gpus, engine_gpus, is_shared)})
    if training.gpus is None and training.steps and any(num_gpus.values()):
        placed = () if is_shared else place(config, 0, num_gpus).engines
        used = {(engine.node, gpu) for engine in placed for gpu in engine.gpus}
        rest = {node: [gpu for gpu in range(number) if (node, gpu) not in used] for node, number in num_gpus.items()}
        training = training.model_copy(update={"gpus": {node: gpus for node, gpus in rest.items() if gpus}})
    return config.model_copy(update={"training": training})


def _engines(
    config: RunConfig, num_gpus: Mapping[str, int], engine_gpus: int | None, is_shared: bool
) -> tuple[PlacedEnginesConfig, ...]:
    """Return an entry per node with engines; if no node has a GPU, one engine for each host."""
    if not any(num_gpus.values()):
        return tuple(PlacedEnginesConfig(host=node) for node in num_gpus if node != LOCAL) or config.engines
    each, learner = gpus_per_engine(config.engine.args), config.training.gpus
    free = {node: number - len((learner or {}).get(node, ())) for node, number in num_gpus.items()}
    wanted = engine_gpus or sum(free.values())
    args = SHARING_ARGS if is_shared and memory_share(config.engine.args) is None else ()
    found: list[PlacedEnginesConfig] = []
    for node in reversed(free):
        if count := min(free[node], wanted) // each:
            gpus = list(range(count * each)) if is_shared else None
            found.insert(0, PlacedEnginesConfig(host=node, count=count, gpus=gpus, args=args))
            wanted -= count * each
    return tuple(found) or config.engines  # of which the placement says that there is no place
