"""Steer runs of a stack from outside: record the request in Postgres, then wake the workflow, or start it.

If the process dies in between, or Temporal is away, nothing is lost: TrainRun looks once a minute, and the sweep starts
the workflow of a running run that has none.
"""

import contextlib
import getpass
import os
import socket
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from temporalio.service import RPCError

from activities import steering
from ratchet.errors import ConfigError, MachineError
from ratchet.run_names import require_target_name
from ratchet.steering_payloads import SteerRunInput
from ratchet.temporal_client import one_line, start_train_run
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import SteeringAction
from stack.part_health import HealthState, read_fresh_health
from stack.parts import Stack
from stack.probes import is_missed
from stack.startup import connect_stack
from store import evaluations, runs
from store.steering import SteeringAnswer

_STARTING = (SteeringAction.RESUME, SteeringAction.EXTEND)


def who_asks() -> str:
    """Return `user@host` of this process, for the audit table."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


async def steer_run(
    stack: Stack,
    action: SteeringAction,
    run_id: str,
    by: str,
    reason: str = "",
    steps: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> SteeringAnswer:
    """Pause, resume, drain, stop, extend or change a run. Raises ConfigError with the reason of a refusal, and
    MachineError if a run could not go on because a part of the stack is given up or does not answer."""
    settings = load_temporal_settings()
    input = SteerRunInput(
        run_id=run_id, action=action, request_id=uuid4().hex, by=by, reason=reason, steps=steps, changes=changes or {}
    )
    client = None
    if action in _STARTING:
        _require_parts(stack)
        client = await connect_stack(stack, settings)  # before anything is changed
    async with stack.database() as database:
        answer = await steering.apply_to_run(database, settings, input)
        row = await database.run(runs.get_run, run_id)
    if row is None or row.source_run_id is not None:  # the learner service looks by itself
        return answer
    if client is not None:
        try:
            await start_train_run(client, settings, run_id)
        except RPCError as error:  # the store has the wish, and the sweep starts the workflow
            return SteeringAnswer(
                f"{answer.text}. Temporal has not woken the run ({one_line(error)}): it notices within two minutes "
                "after Temporal is back",
                answer.changed,
            )
    elif answer.changed and not await wake_run(stack, run_id):
        return SteeringAnswer(
            f"{answer.text}. Temporal does not answer: the run notices within a minute after it is back"
        )
    return answer


def _require_parts(stack: Stack) -> None:
    health = read_fresh_health(stack.home) or {}
    for name, part in health.items():
        if part.state is HealthState.GIVEN_UP and is_missed(name, health):
            raise MachineError(f"{name} is {part.summary(time.time())}; run `ratchet up` first")


async def wake_run(stack: Stack, run_id: str) -> bool:
    """Let the run's workflow, if it has one, look at Postgres now; return False if Temporal does not answer."""
    try:
        client = await connect_stack(stack, load_temporal_settings())
    except MachineError:
        return False
    with contextlib.suppress(RPCError):  # a run that has ended has no workflow
        await client.get_workflow_handle(f"run/{run_id}").signal("wake")
    return True


async def steer_target(stack: Stack, action: SteeringAction, what: str, by: str, reason: str = "") -> SteeringAnswer:
    """Cancel or retry a group or a rollout. Raises ConfigError, MachineError and TemporalUnavailableError."""
    require_target_name(what)
    settings = load_temporal_settings()
    async with stack.database() as database:
        run_id = await steering.run_of(database, what)
        client = await connect_stack(stack, settings)
        answer = await steering.apply_to_target(database, client, action, what, uuid4().hex, by, reason)
    if answer.changed and action is SteeringAction.RETRY:
        with contextlib.suppress(RPCError):  # the sweep starts it
            await start_train_run(client, settings, run_id)  # a retried evaluation may have opened the run again
    elif answer.changed:
        await wake_run(stack, run_id)
    return answer


async def cancel_evaluations(stack: Stack, run_id: str, by: str, reason: str = "") -> list[str]:
    """End the run's evaluations that have begun, with the verdicts that they have; return their labels.

    One that ends by itself meanwhile is no error.
    """
    cancelled = []
    for label in await _open_evaluations(stack, run_id):
        try:
            await steer_target(stack, SteeringAction.CANCEL, f"evaluate/{run_id}/{label}", by, reason)
        except ConfigError:
            if label in await _open_evaluations(stack, run_id):
                raise
        else:
            cancelled.append(label)
    return cancelled


async def _open_evaluations(stack: Stack, run_id: str) -> list[str]:
    async with stack.database() as database, database.begin() as connection:
        begun = await evaluations.begun_evaluations(connection, run_id)
    return [one.label for one in begun if not one.has_ended]


async def retry_stage(stack: Stack, what: str, stage: str, by: str, reason: str = "") -> SteeringAnswer:
    """Try a pending stage of a rollout again now. Raises ConfigError, MachineError and TemporalUnavailableError."""
    require_target_name(what)
    async with stack.database() as database:
        await steering.run_of(database, what)
        client = await connect_stack(stack, load_temporal_settings())
        return await steering.reset_stage(database, client, what, stage, uuid4().hex, by, reason)
