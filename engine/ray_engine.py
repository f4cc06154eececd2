"""Run an engine's wrapper on another node of the Ray cluster, for as long as this process lives.

The supervised process stays here: it is restarted when the engine ends, and Ray ends the engine when it is gone.
"""

import asyncio
import signal
import sys
from typing import Any

from engine.process import STOP_SECONDS, EngineSettings
from engine.wrapper import run_engine
from ratchet.errors import EngineUnavailableError, MachineError


def _run(settings: EngineSettings) -> None:
    """Run on the node, in the main thread of a process of its own."""
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(run_engine(settings))


def run_engine_on_node(settings: EngineSettings, node: str, ray_address: str) -> None:
    """Run the engine on the node until this process gets a signal.

    Raises MachineError if the cluster has no such node, EngineUnavailableError if the node or the engine is lost.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=ray_address, log_to_driver=True, logging_level="ERROR", namespace="ratchet-engines")
    strategy = NodeAffinitySchedulingStrategy(node_id=_node_id(ray.nodes(), node), soft=False)
    # The engine's GPUs are no resource of Ray, which hands out the learner's only; so it asks for none.
    remote = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_run)
    task = remote.remote(settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        ray.get(task)
    except (SystemExit, KeyboardInterrupt):  # the wrapper takes it as a signal, and marks the engine as gone
        ray.cancel(task)
        ray.wait([task], timeout=2 * STOP_SECONDS)
        raise
    except ray.exceptions.RayError as error:
        raise EngineUnavailableError(f"the engine on {node} has ended: {str(error).strip().splitlines()[-1]}") from None


def _node_id(nodes: list[dict[str, Any]], node: str) -> str:
    alive = {str(one["NodeManagerAddress"]): str(one["NodeID"]) for one in nodes if one["Alive"]}
    if node not in alive:
        raise MachineError(
            f"host {node} is no node of the Ray cluster; it has {', '.join(sorted(alive))}: run "
            "`ray start --address=HEAD:PORT` there, or `ratchet launch`"
        )
    return alive[node]
