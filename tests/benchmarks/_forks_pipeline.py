"""Plain groups against groups of forks through the whole pipeline: two runs of the quickstart on a stack of their own.

The plain run trains the config's steps. The other one, half of whose groups are forks, begins with the same weights and
is stopped after the step at which its consumed rollouts have sampled as many tokens; what a fork was given again is not
counted. All held-out tasks are then evaluated in the same way for the initial weights and for both results.
"""

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.console import say
from cli.down import kill_stack_boxes
from client.evaluating import EvaluationSettings, run_evaluation
from client.steering import steer_run
from ratchet.config import RunConfig
from ratchet.config_sources import load_config
from ratchet.types import RunState, SteeringAction
from stack.follow_run import start_run, watch_run
from stack.parts import Stack
from stack.startup import bring_up
from stack.supervisor import Supervisor
from tests.benchmarks._commit import commit
from tests.benchmarks._recovery_evidence import Store
from tests.free_ports import free_ports

_LOOK_SECONDS = 2.0
_MOST_STEPS_FACTOR = 4
_SAMPLED = (
    "SELECT coalesce(sum(t.num_sampled), 0) FROM batch_item b JOIN rollout r ON r.group_id = b.group_id"
    " JOIN turn t ON t.rollout_id = r.id AND t.attempt = r.attempt AND t.worker <> 'copied'"
    " WHERE b.run_id = $1 AND b.step <= $2"
)
_GROUPS = (
    "SELECT g.forked_turn_id IS NOT NULL AS is_fork, count(*) AS groups, count(*) FILTER (WHERE b.use = 'trained')"
    " AS trained FROM batch_item b JOIN rollout_group g ON g.id = b.group_id WHERE b.run_id = $1 AND b.step <= $2"
    " GROUP BY 1"
)
_REPLAYED = (
    "SELECT count(*) AS given, count(*) FILTER (WHERE t.replayed_at IS NOT NULL) AS replayed FROM turn t"
    " JOIN rollout r ON r.id = t.rollout_id WHERE r.run_id = $1 AND t.worker = 'copied'"
)


@contextmanager
def own_stack() -> Iterator[Stack]:
    """A state directory of its own, which the stack's processes and boxes do not survive."""
    home = Path(tempfile.mkdtemp(prefix="ratchet-forks-"))
    home.chmod(0o755)  # the embedded Postgres runs as another user
    os.environ["RATCHET_HOME"] = str(home)
    free_ports(home)
    stack = Stack(home)
    try:
        yield stack
        asyncio.run(kill_stack_boxes(stack.environment()))
    finally:
        Supervisor(stack).down()
        shutil.rmtree(home, ignore_errors=True)


async def run_to(stack: Stack, store: Store, config: RunConfig, name: str, budget: int | None) -> str:
    """Run to the config's last step, or to the one at which `budget` tokens were sampled; return the run."""
    run_id = await start_run(stack, config, name, new=True, say=say)
    watching, step = asyncio.create_task(watch_run(stack, run_id, say)), 0
    while not watching.done() and budget is not None:
        await asyncio.wait({watching}, timeout=_LOOK_SECONDS)
        state = await asyncio.to_thread(store.rows, "SELECT step FROM run WHERE run_id = $1", run_id)
        if state[0][0] > step:
            step = state[0][0]
            sampled = (await asyncio.to_thread(store.rows, _SAMPLED, run_id, step))[0][0]
            say(f"{name}: {sampled} of {budget} tokens after step {step}")
            if sampled >= budget:
                await steer_run(stack, SteeringAction.STOP, run_id, by="the benchmark")
                break
    await watching
    return run_id


def figures(store: Store, run_id: str, seconds: float) -> dict[str, Any]:
    row = store.rows("SELECT step, state, state_reason FROM run WHERE run_id = $1", run_id)[0]
    if row["state"] not in (RunState.DONE, RunState.STOPPED):
        raise SystemExit(f"run {run_id} is {row['state']}: {row['state_reason']}")
    groups = {("forks" if one["is_fork"] else "plain"): dict(one) for one in store.rows(_GROUPS, run_id, row["step"])}
    found = {"run_id": run_id, "steps": row["step"], "seconds": round(seconds), "groups": groups}
    found |= {"given_turns": dict(store.rows(_REPLAYED, run_id)[0])}
    return found | {"sampled_tokens": int(store.value(_SAMPLED, run_id, row["step"]))}


def evaluated(stack: Stack, what: str, samples: int) -> dict[str, Any]:
    found = asyncio.run(
        run_evaluation(stack, what, EvaluationSettings(samples=samples, new=True), "the benchmark", say)
    )
    (report,) = found["evaluations"].values()
    return {name: report[name] for name in ("tasks", "rollouts", "without_verdict")} | report["pass_at_k"]["1"]


def measure_pair(
    config_path: Path, overrides: list[str], forked: list[str], samples: int, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run plain groups, then groups of forks with the settings `forked`; `write` gets what is known so far."""
    found: dict[str, Any] = {
        "commit": commit(),
        "config": str(config_path),
        "overrides": overrides,
        "fork_settings": forked,
    }
    more = [*overrides, "evaluation.at=[]"]
    plain = load_config(config_path, more)
    most = _MOST_STEPS_FACTOR * plain.training.steps
    with own_stack() as stack:
        bring_up(stack, plain, say)
        store, budget = Store(stack.environment()["RATCHET_DATABASE_URL"]), None
        initial = stack.home / "initial.yaml"
        initial.write_text(json.dumps(plain.model_dump(mode="json")))  # JSON is YAML
        found["before"] = evaluated(stack, str(initial), samples)
        write(found)
        for name, config in (
            ("plain", plain),
            ("forks", load_config(config_path, [*more, *forked, f"training.steps={most}"])),
        ):
            bring_up(stack, config, say, for_run=True)
            begun = time.monotonic()
            run_id = asyncio.run(run_to(stack, store, config, name, budget))
            one = figures(store, run_id, time.monotonic() - begun)
            budget = one["sampled_tokens"]
            found[name] = one
            write(found)
            one["after"] = evaluated(stack, f"{run_id}@{one['steps']}", samples)
            write(found)
    return found
