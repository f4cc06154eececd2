"""Stage `agent`: run the agent's program in its box.

The launcher in the box starts the program once (`mkdir` is atomic); any number of tries and workers then wait for the
same program. A cancelled stage leaves the program running, until `diff` or the end of its box. At its deadline the
launcher suspends the program, and this stage decides if it goes on, as only the store knows how long it waited.
"""

import asyncio
import contextlib
import dataclasses
import time

import structlog

from activities.box_lifecycle import box_ttl_seconds, connected_box, guard_seconds
from activities.guard import require_wall_time
from activities.harnesses import launcher
from activities.harnesses.base import DEFAULT_PROMPT, BaseHarness, ExitReport, HarnessSpec, render_prompt
from activities.harnesses.cli_exits import exit_of_error
from activities.harnesses.registry import Harnesses
from activities.progress_reader import ProgressReader
from activities.stage import activity_stage, heartbeating
from activities.stage_context import BoxActivities, StageContext
from ratchet import secrets
from ratchet.background_task import errors_logged, running_beside
from ratchet.config import RunConfig
from ratchet.durations import duration_in_words
from ratchet.errors import CommandFailedError, GuardSpentError, RatchetError, SandboxBusyError, StoreUnavailableError
from ratchet.payloads import AgentResult, StageInput
from ratchet.types import MODEL_NAME, AgentExit
from sandboxes.base import Sandbox
from store import outages, sessions

_LOG = structlog.get_logger()

_WATCH_SECONDS = 10.0
_LEAST_RESUMED_SECONDS = 1.0
_GRACE_SECONDS = 60.0
"""Time beyond the guard for the end of an agent that was ended, and for retries of a busy box."""
_MAX_DETAIL_CHARS = 300
_TTL_UPDATES_PER_MARGIN = 10
"""The number of renewals of the time to live within `rollout.ttl_margin`."""


@dataclasses.dataclass(eq=False)
class AgentActivities(BoxActivities):
    """The agent stage. `adapter_url`: the adapter as boxes reach it, without `/v1`."""

    harnesses: Harnesses
    adapter_url: str

    def __post_init__(self) -> None:
        self.progress = ProgressReader(self.database)

    @activity_stage("agent")
    async def agent(self, input: StageInput) -> AgentResult:
        """Start the program unless it was started, wait for its end and return how it ended.

        Raises SandboxGoneError if the box dies, GuardSpentError if the guard ends the program before its budget is
        used or if the program does not end at the guard.
        """
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            # A late try of a worker that was thought dead finds the session closed: its fence is rolled back with it.
            context = await StageContext.load_within(connection, config, input)
            session_id = await sessions.session_id_of(connection, input.rollout_id, input.attempt)
            token = await sessions.add_token(connection, session_id)
        try:
            return await self._run_agent(context, session_id, token)
        except SandboxBusyError:  # retried, also if only this box is out of reach, so it must end at last
            async with heartbeating():
                await self._require_wall_time(context)
            raise

    async def _run_agent(self, context: StageContext, session_id: int, token: str) -> AgentResult:
        config, attempt = context.config, context.input.attempt
        harness = self.harnesses[config.harness.name]
        spec = self._spec(context)
        async with (
            connected_box(self.provider, context.provider_id) as box,
            heartbeating(lambda: self.progress_in_words(context.input)),
            running_beside(self._watch_agent(box, context)),
            running_beside(self.renew_ttl(box, config, context.input.rollout_id)),
        ):
            await harness.install(box, spec)
            await harness.start(box, spec, attempt, token)
            ended = await self._wait_until_guard(box, harness, context)
            while ended.is_suspended:
                await self._resume_or_stop(box, context, session_id, ended)
                ended = await self._wait_until_guard(box, harness, context)
            if ended.kind is AgentExit.TIME_BUDGET:
                await self._wait_for_records(session_id)
            if ended.is_cut:
                # An agent whose own time is over is suspended and not cut. `used_seconds` may be more than its limit,
                # because waits for us are in it.
                raise GuardSpentError(
                    f"the rollout's guard ended the agent after {ended.used_seconds:.0f} s, before its time was over"
                )
        progress = await self._session_progress(context.input)
        reason = "" if progress.has_called else uncalled(ended, progress.refusal)
        is_final = not progress.has_called and is_too_long(ended, progress.refusal)
        if is_final:
            limit = config.sampling.max_context_tokens
            reason += (
                f"; what the agent says by itself does not fit (sampling.max_context_tokens is {limit}): give it more "
                "room, or choose an agent that says less"
            )
        exit = AgentExit.STARVED if reason else ended.kind
        async with self.database.begin() as connection:
            await context.write_attempt(
                connection, {"agent_exit": exit, "used_seconds": ended.used_seconds, "harness_version": harness.version}
            )
        return AgentResult(
            agent_exit=exit,
            num_turns=progress.num_turns,
            used_seconds=ended.used_seconds,
            reason=reason,
            is_final=is_final,
            waited_seconds=round(progress.waited_seconds, 1),
        )

    async def _require_wall_time(self, context: StageContext) -> float:
        guard = guard_seconds(context.config, self.configs.settings)
        return await require_wall_time(self.database, context.input, guard, _GRACE_SECONDS)

    async def _wait_until_guard(self, box: Sandbox, harness: BaseHarness, context: StageContext) -> ExitReport:
        """Wait for the agent; at the guard end it; its work is not graded. Raises GuardSpentError if it goes on."""
        attempt = context.input.attempt
        waiting = asyncio.ensure_future(harness.wait(box, attempt))
        pause_seconds = _WATCH_SECONDS
        try:
            while not (await asyncio.wait({waiting}, timeout=pause_seconds))[0]:
                pause_seconds = _WATCH_SECONDS
                with contextlib.suppress(StoreUnavailableError):
                    left = await self._require_wall_time(context)
                    pause_seconds = max(_WATCH_SECONDS, left)
                    if left <= 0:
                        _LOG.warning("agent ended at the guard", rollout_id=context.input.rollout_id)
                        with contextlib.suppress(SandboxBusyError, CommandFailedError):
                            await launcher.stop(box, attempt, "guard")
            return waiting.result()
        finally:
            waiting.cancel()
            await asyncio.wait({waiting})

    async def _wait_for_records(self, session_id: int) -> None:
        """Wait until adapters have written for how long the session's calls waited; a lock on its row stops them."""
        await self.database.run(sessions.wait_for_writers, session_id)
        await asyncio.sleep(2 * sessions.WAITS_RECORDED_SECONDS)

    async def _resume_or_stop(
        self, box: Sandbox, context: StageContext, session_id: int, suspended: ExitReport
    ) -> None:
        """Let an agent that is suspended at its deadline use the time that it waited for us, or end it.

        Nothing is lost if the worker dies on any line: the agent stays suspended, and the next try is asked again. An
        error of the store ends this try in the same way.
        """
        asked = time.monotonic()
        await self._wait_for_records(session_id)
        suspended_seconds = suspended.suspended_seconds + time.monotonic() - asked
        async with self.database.begin() as connection:
            await outages.add_suspension(connection, session_id, suspended_seconds)
            gateway_seconds = await outages.gateway_away_seconds(connection, session_id, box.id)
        input = context.input
        progress = await self._session_progress(input)
        report = dataclasses.replace(suspended, suspended_seconds=suspended_seconds)
        # The gateway's outage ends at the latest with the suspension, which is among the waits.
        waited_seconds = progress.waited_seconds + max(0.0, gateway_seconds - suspended_seconds)
        owed = owed_seconds(report, context.agent_seconds, waited_seconds)
        _LOG.info("agent at its deadline", rollout_id=input.rollout_id, owed_seconds=round(owed, 1))
        if owed > _LEAST_RESUMED_SECONDS:
            await launcher.resume_suspended(box, input.attempt, owed)
        else:
            await launcher.stop(box, input.attempt, "deadline")

    def _spec(self, context: StageContext) -> HarnessSpec:
        config, task = context.config, context.task
        template = config.harness.prompt or DEFAULT_PROMPT
        return HarnessSpec(
            adapter_base_url=self.adapter_url,
            model_name=MODEL_NAME,
            workdir=task.workdir,
            prompt=render_prompt(template, task.spec["problem_statement"], task.workdir),
            max_turns=config.harness.max_turns,
            step_timeout_seconds=config.harness.step_timeout_seconds,
            time_budget_seconds=context.agent_seconds,
            agent_user=context.agent_user,
            max_context_tokens=config.sampling.max_context_tokens,
            max_response_tokens=config.sampling.max_response_tokens,
            extra_args=config.harness.extra_args,
            extra_env=secrets.resolve_references("harness.extra_env", config.harness.extra_env),
            task_env=task.spec.get("agent_environment", {}),
            extra=config.harness.all_options(),
        )

    async def progress_in_words(self, input: StageInput) -> str:
        """Return how far the agent is, for heartbeats."""
        limits = (await self.configs.of_rollout(input.rollout_id)).limits
        return agent_progress(await self._session_progress(input), limits.agent_seconds)

    async def _session_progress(self, input: StageInput) -> sessions.SessionProgress:
        return await self.progress.read(input.rollout_id, input.attempt)

    async def _watch_agent(self, box: Sandbox, context: StageContext) -> None:
        """Extend the deadline by the time that the agent waits for an engine or an adapter, and end a stalled agent.

        While the store is away, the time for which the agent has waited is unknown, and it can make no call; that time
        is not the agent's either. An agent is stalled if it has made no model call for `stall_seconds` of its own time
        and waits for none; it is ended, with the exit of a spent time budget. Runs until it is cancelled.
        """
        input, stall_seconds = context.input, context.config.limits.stall_seconds
        extended_seconds = 0.0
        num_turns = None
        waited_before_call = 0.0  # time that is not the agent's before the last call, which is not idle time after it
        looked_at = time.monotonic()
        while True:
            with errors_logged("agent not watched", rollout_id=input.rollout_id), contextlib.suppress(RatchetError):
                waited_seconds = extended_seconds + time.monotonic() - looked_at
                looked_at = time.monotonic()
                progress = None
                with contextlib.suppress(StoreUnavailableError):
                    progress = await self._session_progress(input)
                    waited_seconds = progress.waited_seconds
                if waited_seconds > extended_seconds + 1:
                    await launcher.extend_deadline(box, input.attempt, waited_seconds)
                    extended_seconds = waited_seconds
                if progress is not None:
                    if num_turns not in (None, progress.num_turns):
                        waited_before_call = progress.recorded_wait_seconds
                    num_turns = progress.num_turns
                    idle_seconds = progress.idle_seconds - (progress.recorded_wait_seconds - waited_before_call)
                    is_idle = stall_seconds is not None and idle_seconds > stall_seconds
                    if is_idle and not await launcher.is_suspended(box, input.attempt):
                        _LOG.warning("agent stalled", rollout_id=input.rollout_id, idle_seconds=round(idle_seconds))
                        await launcher.stop(box, input.attempt, "stalled")
            await asyncio.sleep(_WATCH_SECONDS)

    async def renew_ttl(self, box: Sandbox, config: RunConfig, rollout_id: int) -> None:
        """Renew the box's time to live until cancelled: unlike the budgets, it also counts outages and queues."""
        settings = self.configs.settings
        ttl_seconds = box_ttl_seconds(config, settings, self.provider.capabilities.max_ttl_seconds)
        while True:
            with errors_logged("time to live not extended", rollout_id=rollout_id):
                await box.set_ttl(ttl_seconds)
            await asyncio.sleep(settings.rollout.ttl_margin / _TTL_UPDATES_PER_MARGIN)


def agent_progress(progress: sessions.SessionProgress, budget_seconds: float) -> str:
    """Return how far an agent is and what it waits for, as its heartbeats show it."""
    made = f"{progress.num_turns} model calls answered"
    age = progress.last_call_age_seconds
    if age is None:
        now = f"no model call begun in the {duration_in_words(progress.idle_seconds)} since the agent's start"
    elif progress.has_open_call:
        now = f"the next one has waited for its answer for {duration_in_words(age)}"
    else:
        now = f"the last one {duration_in_words(age)} ago; the agent works"
    waited = progress.waited_seconds
    owed = (
        f" and the {duration_in_words(waited)} for which it has waited for an engine or the adapter"
        if waited >= 1
        else ""
    )
    return f"{made}, {now}; its budget is {budget_seconds:.0f} s{owed}"


def owed_seconds(ended: ExitReport, budget_seconds: float, waited_seconds: float) -> float:
    """Return how much of its budget an agent had left at its deadline. `waited_seconds` contains the suspension
    (`outages.add_suspension`); a wait during it does not count twice."""
    return waited_seconds - ended.suspended_seconds - (ended.used_seconds - budget_seconds)


def is_too_long(ended: ExitReport, refusal: str | None) -> bool:
    """Return whether what the agent says first does not fit, so that it began no call: no other box changes that."""
    return exit_of_error(refusal) is AgentExit.CONTEXT_FULL if refusal else ended.kind is AgentExit.CONTEXT_FULL


def uncalled(ended: ExitReport, refusal: str | None) -> str:
    """Return the reason why an agent that has begun no model call is starved, however it ended.

    The policy acts only through its answers. Without a call it has had no influence on the agent, so the end says
    nothing about it, and a policy cannot use this to avoid verdicts. `refusal`: why its first call was refused.
    """
    if refusal is not None:
        return f"the agent's first model call was refused: {secrets.without_secrets(refusal)[:_MAX_DETAIL_CHARS]}"
    code = "" if ended.exit_code is None else f" with exit code {ended.exit_code}"
    said = secrets.without_secrets(ended.detail)[-_MAX_DETAIL_CHARS:]
    return f"the agent made no model call; it ended as {ended.kind}{code}" + (f": {said}" if said else "")
