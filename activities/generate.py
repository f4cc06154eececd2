"""Stage `generate`: the user's own function `generate(args, sample, sampling_params)`, from the first box to samples.

It takes the place of the stages from `workspace` to `grade`, which it calls as methods of `args.rollout`. It lives in
the worker's process, so the workflow repeats all of it if that dies, as another attempt with boxes and a session of its
own. What it returns is compared with what its session has recorded; nothing else is trained.
"""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
from temporalio.exceptions import ApplicationError

from activities.agent import AgentActivities
from activities.boot import BootActivities
from activities.box_lifecycle import connected_box, guard_seconds, try_kill_box
from activities.diff import DiffActivities
from activities.grade import GradeActivities
from activities.guard import require_wall_time
from activities.outcomes import RolloutChains, build_rollout_chains
from activities.stage import activity_stage, heartbeating
from activities.workspace import WorkspaceActivities
from ratchet.background_task import running_beside
from ratchet.config import RunConfig
from ratchet.errors import ConfigError, RatchetError, StoreUnavailableError
from ratchet.import_path import import_function
from ratchet.payloads import DiffResult, GradeResult, LiveSandbox, StageInput
from ratchet.types import SandboxRole
from ratchet.vime_names import values_of_arguments
from sandboxes.base import Sandbox
from store import chains, rollouts, samples, sessions, tasks
from store.arrays import unpack_bytes
from training.sample_export import sample_fields

_WATCH_SECONDS, _BUSY_PAUSE = 10.0, timedelta(seconds=3)


@dataclass(frozen=True, slots=True)
class GenerateActivities:
    """The generate stage, made of the others."""

    boot: BootActivities
    workspace: WorkspaceActivities
    agent: AgentActivities
    diff: DiffActivities
    grade: GradeActivities

    @activity_stage("generate")
    async def generate(self, input: StageInput) -> DiffResult:
        """Call the function and store which of the recorded chains train. Raises ConfigError if the function fails or
        makes no patch or no model call, GuardSpentError at the guard."""
        started = time.monotonic()
        config = await self.agent.configs.of_rollout(input.rollout_id)
        async with self.agent.database.begin() as connection:
            session_id = await sessions.session_id_of(connection, input.rollout_id, input.attempt)
            token = await sessions.add_token(connection, session_id)
            task = await tasks.task_of_rollout(connection, input.rollout_id)
            temperature = await rollouts.temperature_of(connection, input.rollout_id)
        rollout = OwnRollout(self, input, config, token)
        args = SimpleNamespace(rollout=rollout, **values_of_arguments(config))
        sample = SimpleNamespace(prompt=task.spec["problem_statement"], label=task.label, metadata=task.spec)
        params = {"temperature": temperature, "max_new_tokens": config.sampling.max_response_tokens}
        async with heartbeating(lambda: self.agent.progress_in_words(input)):
            result = await rollout.finish(await self._within_guard(input, config, (args, sample, params)))
        return result.model_copy(update={"used_seconds": time.monotonic() - started})

    async def _within_guard(self, input: StageInput, config: RunConfig, arguments: tuple[Any, ...]) -> Any:
        """Return what the function returns; it is cancelled at the rollout's guard."""
        path, guard = str(config.harness.generate), guard_seconds(config, self.agent.configs.settings)

        async def work() -> Any:
            return await import_function("harness.generate", path)(*arguments)

        working = asyncio.create_task(work())
        try:
            while not (await asyncio.wait({working}, timeout=_WATCH_SECONDS))[0]:
                with suppress(StoreUnavailableError):
                    await require_wall_time(self.agent.database, input, guard)
            return working.result()
        except (ApplicationError, RatchetError):
            raise
        except Exception as error:  # the user's own code may raise anything
            raise ConfigError(f"harness.generate: {path!r} failed: {type(error).__name__}: {error}") from error
        finally:
            working.cancel()
            await asyncio.wait({working}, timeout=_WATCH_SECONDS)


class OwnRollout:
    """One attempt as the user's function sees it. An error of a method ends it, unless the function catches the error.

    `base_url`: the adapter as boxes reach it, without `/v1`. `api_key`: the session's token.
    """

    def __init__(self, stages: GenerateActivities, input: StageInput, config: RunConfig, token: str) -> None:
        self.base_url = stages.agent.adapter_url
        self.api_key = token
        self._stages = stages
        self._database = stages.agent.database
        self._input = input
        self._config = config
        self._sandbox_ids: dict[str, int] = {}
        self._is_in_box = False
        self._patch: DiffResult | None = None
        self._built = RolloutChains([], 0, 0)
        self._samples: list[SimpleNamespace] | None = None

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """Make a box of the task's image, with the repository prepared, which ends with the block. One at a time, since
        the next one takes the session, and rollouts that wait for a second box would hold each other up."""
        if self._is_in_box or self._patch is not None:
            raise ConfigError(
                "harness.generate: a rollout has one `sandbox()` at a time, and none after its `git_diff`"
            )
        self._is_in_box = True
        agent, live = self._stages.agent, None
        try:
            live = await self._boot(SandboxRole.AGENT)
            self._sandbox_ids[live.provider_id] = live.sandbox_id
            await self._stages.workspace.workspace(self._with(sandbox_id=live.sandbox_id))
            async with (
                connected_box(agent.provider, live.provider_id) as box,
                running_beside(agent.renew_ttl(box, self._config, self._input.rollout_id)),
            ):
                yield box
        finally:
            self._is_in_box = False
            if live is not None:
                await try_kill_box(self._database, agent.provider, live.sandbox_id, live.provider_id)

    async def run_agent(self, box: Sandbox) -> str:
        """Run the program of `harness.name` within its time budget and return a value of `AgentExit`."""
        ended = await self._stages.agent.agent(self._with(sandbox_id=self._sandbox_ids[box.id]))
        if ended.reason:  # it has made no model call
            raise ConfigError(ended.reason)
        return ended.agent_exit

    async def git_diff(self, box: Sandbox) -> bytes:
        """Close the session, store the box's changes as the attempt's patch, kill the box, and return the patch."""
        self._patch = await self._stages.diff.diff(self._with(sandbox_id=self._sandbox_ids[box.id]))
        patch = await self._database.run(rollouts.get_patch, self._patch.patch_id, self._input.rollout_id)
        return unpack_bytes(patch.diff)

    async def grade(self) -> GradeResult | None:
        """Grade the patch in a fresh box. None: no verdict yet; the workflow asks further boxes after the function."""
        if self._patch is None:
            raise ConfigError("harness.generate: `grade` needs the patch that `git_diff` takes")
        with suppress(ApplicationError):
            live = await self._boot(SandboxRole.GRADE)
            work = self._with(sandbox_id=live.sandbox_id, role=SandboxRole.GRADE, patch_id=self._patch.patch_id)
            self._patch = self._patch.model_copy(update={"grade": await self._stages.grade.grade(work)})
        return self._patch.grade

    async def samples(self) -> list[SimpleNamespace]:
        """Close the session and return what it has recorded, a sample per chain, with vime's names and no texts."""
        if self._samples is None:
            at = (self._input.rollout_id, self._input.attempt)
            async with self._database.begin() as connection:
                await rollouts.take_fence(connection, *at)
                await rollouts.close_sessions(connection, at[0])
                self._built = await build_rollout_chains(connection, *at, self._config, chosen_only=False)
                await chains.replace_chains(connection, at[0], self._built.chains)
                run_id = await rollouts.run_of_rollout(connection, at[0])
                found = [one async for one in samples.samples_of_rollouts(connection, run_id, None, at[:1])]
            fields = [sample_fields(one, lambda ids: "") | {"remove_sample": False} for one in found]
            self._samples = [SimpleNamespace(**one) for one in fields[: len(self._built.chains)]]
        return copy.deepcopy(self._samples)

    async def finish(self, returned: Any) -> DiffResult:
        """Store which chains train: those of the returned sample, or of the samples in a sequence.

        The verdict decides the reward, so rewards in the samples that add up to another one are named.
        """
        recorded, chosen, unlike = await self.samples(), set[int](), []
        if self._patch is None or not self._built.num_turns:
            lacks = "model call with `api_key`" if self._patch else "patch: it has to call `git_diff`"
            raise ConfigError(f"harness.generate: the function made no {lacks}")
        given = returned if isinstance(returned, Sequence) else [returned]
        for number, sample in enumerate(given):
            problem = differing_field(sample, recorded)
            if problem:
                unlike.append(f"sample {number} ({problem})")
            elif not getattr(sample, "remove_sample", False):
                chosen.update(no for no, one in enumerate(recorded) if not differing_field(sample, [one]))
        trained = [one if no in chosen else one.untrained() for no, one in enumerate(self._built.chains)]
        async with self._database.begin() as connection:
            await rollouts.take_fence(connection, self._input.rollout_id, self._input.attempt)
            await chains.replace_chains(connection, self._input.rollout_id, trained)
        reasons = [f"not trained, because not as recorded: {', '.join(unlike)}"] if unlike else []
        rewards = [one.reward for one in given if getattr(one, "reward", None) is not None]
        if rewards and not np.isclose(sum(rewards), float(self._patch.grade is not None and self._patch.grade.solved)):
            reasons.append(f"the samples' reward {sum(rewards):g} is not used; one of your own is `grading.reward`")
        return self._patch.model_copy(update={"reason": "; ".join(reasons)})

    def _with(self, **values: Any) -> StageInput:
        return self._input.model_copy(update=values)

    async def _boot(self, role: SandboxRole) -> LiveSandbox:
        """Wait for a box as the workflow waits, which has made the first one of an agent before."""
        while True:
            try:
                return await self._stages.boot.boot(self._with(sandbox_id=None, role=role))
            except ApplicationError as error:
                if error.non_retryable:
                    raise
                pause = error.next_retry_delay or _BUSY_PAUSE
            await asyncio.sleep(pause.total_seconds())


def differing_field(sample: Any, recorded: Sequence[SimpleNamespace]) -> str:
    """Return the first field in which a sample is like none of the recorded ones, empty if it is one of them."""
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        value: Any = getattr(sample, name, None)
        recorded = [one for one in recorded if np.array_equal(value, getattr(one, name))]
        if not recorded:
            return name
    return ""
