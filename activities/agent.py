"""Stage `run agent`: the agent's program works in the box; this activity starts it once and otherwise only watches.

Why here: the box decides who starts (the launcher's mkdir), so that any number of tries and workers gives one agent.
Called by: the `Rollout` workflow. Never ends the agent, whatever its cancellation details say: `capture diff` does.
"""

import asyncio
import contextlib

import structlog

from activities.harnesses.base import DEFAULT_PROMPT, BaseHarness, ExitReport, HarnessSpec, render_prompt
from activities.harnesses.registry import Harnesses
from activities.run_configs import RunConfigs
from activities.sandboxes.base import Sandbox, SandboxProvider
from activities.stage import activity_stage, heartbeating
from ratchet.background_task import running_beside
from ratchet.config import RunConfig
from ratchet.errors import RatchetError
from ratchet.payloads import AgentResult, StageInput
from ratchet.store import rollouts, sandboxes, sessions, tasks
from ratchet.store.database import Database
from ratchet.store.tasks import TaskRow
from ratchet.types import MODEL_NAME, AgentExit

_LOG = structlog.get_logger()

_WATCH_SECONDS = 10.0
_OWED_SECONDS = 30.0
_TTL_SHARES = 10
"""The time to live is set this many times per `rollout.ttl_margin`."""


class AgentActivities:
    def __init__(
        self, database: Database, provider: SandboxProvider, configs: RunConfigs, harnesses: Harnesses, adapter_url: str
    ) -> None:
        self.database, self.provider, self.configs = database, provider, configs
        self.harnesses, self.adapter_url = harnesses, adapter_url

    @activity_stage("agent")
    async def agent(self, input: StageInput) -> AgentResult:
        """Returns how the agent's program ended. Raises SandboxGoneError where the box died under it."""
        assert input.sandbox_id is not None
        config = await self.configs.of_rollout(input.rollout_id)
        harness = self.harnesses[config.harness.name]
        async with self.database.begin() as connection:
            fence = await rollouts.take_fence(connection, input.rollout_id, input.attempt)
            provider_id = await sandboxes.provider_id(connection, input.sandbox_id)
            task = await tasks.task_of_rollout(connection, input.rollout_id)
            session_id = await sessions.session_id_of(connection, input.rollout_id, input.attempt)
            token = await sessions.add_token(connection, session_id)
        spec = self._spec(config, task)
        box = await self.provider.connect(provider_id)
        try:
            watch = self._watch_agent(box, harness, input, config.limits.stall_seconds)
            async with (
                heartbeating(lambda: self._progress(input)),
                running_beside(watch),
                running_beside(self._keep_box(box, input, config)),
            ):
                await harness.install(box, spec)
                await harness.start(box, spec, input.attempt, token)
                ended = await harness.wait(box, input.attempt)
        finally:
            with contextlib.suppress(RatchetError):
                await box.close()
        progress = await self._session_progress(input)
        exit = (
            AgentExit.STARVED if cut_short(ended, config.limits.agent_seconds, progress.waited_seconds) else ended.kind
        )
        async with self.database.begin() as connection:
            values = {"agent_exit": exit, "used_seconds": ended.used_seconds, "harness_version": harness.version}
            await rollouts.write_attempt(connection, input.rollout_id, input.attempt, fence, values)
        return AgentResult(agent_exit=exit, num_turns=progress.num_turns, used_seconds=ended.used_seconds)

    def _spec(self, config: RunConfig, task: TaskRow) -> HarnessSpec:
        template = config.harness.prompt or DEFAULT_PROMPT
        return HarnessSpec(
            adapter_base_url=self.adapter_url,
            model_name=MODEL_NAME,
            workdir=task.workdir,
            prompt=render_prompt(template, task.spec["problem_statement"], task.workdir),
            max_turns=config.harness.max_turns,
            step_timeout_seconds=config.harness.step_timeout_seconds,
            time_budget_seconds=config.limits.agent_seconds,
            max_context_tokens=config.sampling.max_context_tokens,
            max_response_tokens=config.sampling.max_response_tokens,
            extra_args=config.harness.extra_args,
            extra_env=config.harness.extra_env,
            extra=config.harness.all_options(),
        )

    async def _progress(self, input: StageInput) -> str:
        progress = await self._session_progress(input)
        age = "never" if progress.last_call_age_seconds is None else f"{progress.last_call_age_seconds:.0f} s ago"
        return f"{progress.num_turns} turns, last model call {age}"

    async def _session_progress(self, input: StageInput) -> sessions.SessionProgress:
        async with self.database.begin() as connection:
            progress = await sessions.session_progress(connection, input.rollout_id, input.attempt)
        assert progress is not None, "boot makes the session"
        return progress

    async def _watch_agent(
        self, box: Sandbox, harness: BaseHarness, input: StageInput, stall_seconds: float | None
    ) -> None:
        """While the agent waits for an engine or for an adapter its clock stands still: the box's deadline moves by what the store says.
        An agent that has made no model call for `stall_seconds` of its own time, and waits for none, is ended as at its deadline.
        """
        pushed, num_turns, away_then = 0.0, None, 0.0
        while True:
            with contextlib.suppress(RatchetError):
                progress = await self._session_progress(input)
                if progress.waited_seconds > pushed + 1:
                    await harness.extend(box, input.attempt, progress.waited_seconds)
                    pushed = progress.waited_seconds
                if num_turns not in (None, progress.num_turns):
                    away_then = progress.away_seconds  # what was lost before this call is not idleness after it
                num_turns = progress.num_turns
                idle_seconds = progress.idle_seconds - (progress.away_seconds - away_then)
                if stall_seconds is not None and idle_seconds > stall_seconds:
                    _LOG.warning("agent stalled", rollout_id=input.rollout_id, idle_seconds=round(idle_seconds))
                    await harness.stop(box, input.attempt)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _keep_box(self, box: Sandbox, input: StageInput, config: RunConfig) -> None:
        """A box's time to live counts outages and queues, too, which no budget does: as long as somebody watches, the box has all of it."""
        ttl_seconds = self.configs.ttl_seconds(config, self.provider.capabilities.max_ttl_seconds)
        while True:
            try:
                await box.set_ttl(ttl_seconds)
            except RatchetError as error:
                _LOG.info("time to live not extended", rollout_id=input.rollout_id, reason=str(error))
            await asyncio.sleep(self.configs.settings.rollout.ttl_margin / _TTL_SHARES)


def cut_short(ended: ExitReport, budget_seconds: float, waited_seconds: float) -> bool:
    """Whether the deadline came while time was owed: the stack was away, so that nobody could move it.

    What was owed in the last moments is left aside; a watcher is always a few seconds late.
    """
    by_deadline = ended.kind is AgentExit.TIME_BUDGET and ended.used_seconds >= budget_seconds
    return by_deadline and waited_seconds - (ended.used_seconds - budget_seconds) > _OWED_SECONDS
