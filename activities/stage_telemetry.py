"""Give each try of an activity its ids in log lines, the stages of rollouts their spans, and note how late they begin.

An interceptor of the SDK, so that the activities themselves need nothing. A retried stage is another span of the same
trace, with the number of its try.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import structlog
from pydantic import BaseModel
from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from activities.run_configs import RunConfigs
from activities.stage import BEGUN
from activities.worker_lateness import WorkerLateness
from ratchet import tracing
from ratchet.payloads import AgentResult, GradeResult, LiveSandbox, StageInput
from ratchet.secrets import without_secrets
from ratchet.tracing import Fact, RolloutTrace
from ratchet.types import SandboxRole

_STORE_SECONDS = 2.0
_STAGES_OF_ATTEMPT = ("boot", "workspace", "agent", "diff", "generate")
"""The stages whose spans are children of the attempt; the spans of all other stages are children of the rollout."""

_WAIT_FOR_SLOTS = ("boot", "grade", "control_run")
_LAST = "finalise"


class StageTelemetry(Interceptor):
    """Worker interceptor. `installation`: of this store, in which rollouts are numbered."""

    def __init__(self, installation: UUID, configs: RunConfigs, lateness: WorkerLateness) -> None:
        self.installation = installation
        self.configs = configs
        self.lateness = lateness

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Stage(next, self)


class _Stage(ActivityInboundInterceptor):
    def __init__(self, next: ActivityInboundInterceptor, telemetry: StageTelemetry) -> None:
        super().__init__(next)
        self._telemetry = telemetry

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        if info.heartbeat_timeout:
            activity.heartbeat(BEGUN)  # Temporal knows of a try without one that it has not reached its worker
        argument = input.args[0] if input.args else None
        rollout_id: int | None = getattr(argument, "rollout_id", None)
        ids: dict[str, Fact] = {
            "stage": info.activity_type,
            "try": info.attempt,
            "workflow_id": info.workflow_id,
            "run_id": getattr(argument, "run_id", None),
            "rollout_id": rollout_id,
            "attempt": getattr(argument, "attempt", None),
        }
        if rollout_id is None:
            with _bound(ids):
                return await super().execute_activity(input)
        # The stage itself fails as it should if the store is away; it sends no heartbeat before its own code runs.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_STORE_SECONDS):
                ids["run_id"] = await self._telemetry.configs.run_of_rollout(rollout_id)
        trace = RolloutTrace.of(self._telemetry.installation, rollout_id)
        attempt = _attempt_of(info.activity_type, argument)
        box: dict[str, Fact] = {}
        if isinstance(argument, StageInput):
            box = {"box": argument.sandbox_id, "role": argument.role}
        with (
            self._between_stages(info),
            tracing.rollout_span(trace, attempt, info.activity_type, ids | box),
            _bound(ids | {"trace_id": trace.hex if tracing.is_on() else None}),
        ):
            result = await super().execute_activity(input)
            tracing.add_facts(_facts_of(result))
            return result

    @contextlib.contextmanager
    def _between_stages(self, info: activity.Info) -> Iterator[None]:
        """Measure the time from the end of a stage to the start of the workflow's next one."""
        lateness, workflow_id = self._telemetry.lateness, info.workflow_id
        if workflow_id is None or info.attempt > 1 or not info.activity_id.isdigit():
            yield
            return
        number = int(info.activity_id)
        lateness.stage_began(workflow_id, number, info.activity_type in _WAIT_FOR_SLOTS)
        yield
        if info.activity_type != _LAST:
            lateness.stage_ended(workflow_id, number)


def _bound(ids: dict[str, Fact]) -> contextlib.AbstractContextManager[None]:
    """Add the ids to the log lines of the block."""
    return structlog.contextvars.bound_contextvars(**{name: value for name, value in ids.items() if value is not None})


def _attempt_of(stage: str, argument: Any) -> int | None:
    if stage not in _STAGES_OF_ATTEMPT or getattr(argument, "role", None) is not SandboxRole.AGENT:
        return None
    return int(argument.attempt)


def _facts_of(result: Any) -> dict[str, Fact]:
    """Return what a stage's span says about its result."""
    match result:
        case LiveSandbox():
            return {"box": result.sandbox_id, "box_id": result.provider_id}
        case AgentResult():
            return {"agent_exit": result.agent_exit, "num_turns": result.num_turns}
        case GradeResult():
            verdict = "solved" if result.solved else "rejected" if result.rejected else "not solved"
            return {"verdict": verdict, "reason": without_secrets(result.reason)}
        case BaseModel():
            known = ("outcome", "reward", "num_bytes")
            return {name: getattr(result, name) for name in known if hasattr(result, name)}
    return {}
