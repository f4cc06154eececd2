"""A stack for runs with faults: the supervised parts of the product, with one worker process per queue.

Two parts are started through this module: the engine's wrapper, which runs the seeded engine in the place of vLLM, and
the watcher, whose patience is shorter here, so that a suspended part costs seconds instead of minutes.
"""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

from ratchet import paths
from ratchet.config_engines import DEFAULT_SET
from ratchet.temporal_settings import QUEUES
from stack.parts import WATCHER, Part, Stack
from stack.serving_plan import load_plan

PATIENCE_SECONDS, LEARNER_PATIENCE_SECONDS = 25.0, 150.0
"""The time for which a part may fail its probes here before the watcher restarts it; in the product 60 s to 300 s. A
learner that starts needs more, as Ray starts a process per rank."""
SEED_VARIABLE = "RATCHET_CHAOS_SEED"
_PROBE_SECONDS = 10.0


class ChaosStack(Stack):
    """All state is in `home`, as with every stack."""

    def parts(self) -> list[Part]:
        own = [sys.executable, "-m", "tests.chaos.chaos_stack"]
        found = []
        for part in super().parts():
            if part.name in ("engine", WATCHER):
                found.append(replace(part, command=[*own, part.name]))
            elif part.name == "worker":
                found += [
                    replace(part, name=worker_part(queue), command=[*part.command, "--queue", queue])
                    for queue in QUEUES
                ]
            else:
                found.append(part)
        return found

    @property
    def engine_log(self) -> Path:
        """The log of the calls that the seeded engine has seen; beside the state directory, whose disk may be full."""
        return self.home.parent / "engine_calls.jsonl"


def worker_part(queue: str) -> str:
    """Return the name of the part that serves one queue; that of `control` keeps the name that the watcher probes."""
    return "worker" if queue == "control" else f"worker-{queue}"


def _run_engine(stack: ChaosStack) -> None:
    """Run the product's wrapper; only the command line of vLLM is replaced by that of the seeded engine."""
    from engine import process
    from engine.wrapper import run_engine

    url = stack.environment()["RATCHET_DATABASE_URL"]
    model, seed = load_plan(stack).sets[DEFAULT_SET].model_path, os.environ[SEED_VARIABLE]
    program = [sys.executable, "-m", "tests.chaos.seeded_engine"]
    command = [*program, str(stack.ports["engine"]), str(model), str(stack.engine_log), seed, url]
    process.vllm_command = lambda settings, model: command
    paths.policies().mkdir(parents=True, exist_ok=True)
    settings = process.EngineSettings(
        model_path=model,
        port=stack.ports["engine"],
        database_url=url,
        state_dir=stack.home,
        policies_root=paths.policies(),
    )
    asyncio.run(run_engine(settings))


def _run_watcher(stack: ChaosStack) -> None:
    from stack import part_health
    from stack.part_health import HealthLimits
    from stack.probes import LIMITS
    from stack.watcher import run_watcher

    part_health.MAX_SHORT_LIVES = 1000  # every part is killed more often than a broken one would end
    for part in stack.parts():
        known = LIMITS.get(part.name, HealthLimits())
        patience = LEARNER_PATIENCE_SECONDS if part.name == "learner" else PATIENCE_SECONDS
        LIMITS[part.name] = replace(known, failing_seconds=patience, probe_seconds=_PROBE_SECONDS)
    asyncio.run(run_watcher(stack))


if __name__ == "__main__":
    {"engine": _run_engine, WATCHER: _run_watcher}[sys.argv[1]](ChaosStack())
