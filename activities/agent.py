"""Stage `run agent`: the agent's program works in the box; this activity starts it once and otherwise only watches.

Why here: the box decides who starts (the launcher's mkdir), so that any number of tries and workers gives one agent.
Called by: the `Rollout` workflow. Never ends the agent, whatever its cancellation details say: `capture diff` does.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from activities.boundary import heartbeating, stage
from activities.harnesses.base import DEFAULT_PROMPT, BaseHarness, HarnessSpec, render_prompt
from activities.harnesses.registry import Harnesses
from activities.run_configs import RunConfigs
from activities.sandboxes.base import Sandbox, SandboxProvider
from ratchet.config import RunConfig
from ratchet.errors import RatchetError
from ratchet.store import rollouts, sandboxes, sessions, tasks
from ratchet.store.database import Database
from ratchet.store.tasks import TaskRow
from ratchet.types import MODEL_NAME, AgentResult, StageInput

log = structlog.get_logger()

_WATCH_SECONDS = 10.0


class AgentActivities:
    def __init__(self, database: Database, provider: SandboxProvider, configs: RunConfigs, harnesses: Harnesses, adapter_url: str) -> None:
        self.database, self.provider, self.configs = database, provider, configs
        self.harnesses, self.adapter_url = harnesses, adapter_url

    @stage("agent")
    async def agent(self, input: StageInput) -> AgentResult:
        """Returns how the agent's program ended. Raises SandboxGoneError where the box died under it."""
        assert input.sandbox_id is not None
        config = await self.configs.of_rollout(input.rollout_id)
        harness = self.harnesses[config.harness.name]
        async with self.database.begin() as connection:
            fence = await rollouts.take_fence(connection, input.rollout_id, input.attempt)
            provider_id = await sandboxes.provider_id(connection, input.sandbox_id)
            task = await tasks.of_rollout(connection, input.rollout_id)
            session_id = await sessions.session_id_of(connection, input.rollout_id, input.attempt)
            token = await sessions.add_token(connection, session_id)
        spec = self._spec(config, task)
        box = await self.provider.connect(provider_id)
        try:
            async with heartbeating(lambda: self._progress(input)), self._watching(box, harness, input, config.limits.stall_seconds):
                await harness.install(box, spec)
                await harness.start(box, spec, input.attempt, token)
                ended = await harness.wait(box, input.attempt)
        finally:
            with contextlib.suppress(RatchetError):
                await box.close()
        async with self.database.begin() as connection:
            values = {"agent_exit": ended.kind, "used_seconds": ended.used_seconds, "harness_version": harness.version}
            await rollouts.write_attempt(connection, input.rollout_id, input.attempt, fence, values)
        num_turns = (await self._session_progress(input)).num_turns
        return AgentResult(agent_exit=ended.kind, num_turns=num_turns, used_seconds=ended.used_seconds)

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
            progress = await sessions.progress(connection, input.rollout_id, input.attempt)
        assert progress is not None, "boot makes the session"
        return progress

    @contextlib.asynccontextmanager
    async def _watching(self, box: Sandbox, harness: BaseHarness, input: StageInput, stall_seconds: float | None) -> AsyncIterator[None]:
        """Looks at the session every few seconds, until the block ends.

        While the agent waits for an engine its clock stands still: the box's deadline moves by what the adapter recorded. An agent
        that has made no model call for `stall_seconds`, and waits for none, is ended as at its deadline.
        """

        async def watch() -> None:
            pushed = 0.0
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                with contextlib.suppress(RatchetError):
                    progress = await self._session_progress(input)
                    if progress.engine_wait_seconds > pushed + 1:
                        await harness.extend(box, input.attempt, progress.engine_wait_seconds)
                        pushed = progress.engine_wait_seconds
                    if stall_seconds is not None and progress.idle_seconds > stall_seconds:
                        log.warning("agent stalled", rollout_id=input.rollout_id, idle_seconds=round(progress.idle_seconds))
                        await harness.stop(box, input.attempt)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
