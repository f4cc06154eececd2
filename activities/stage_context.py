"""Load what every stage of a rollout needs before it uses a box: config, task, box and fence."""

import math
from dataclasses import dataclass
from typing import Self

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.run_configs import RunConfigs
from ratchet.config import RunConfig
from ratchet.payloads import StageInput
from sandboxes.base import SandboxProvider
from store import rollouts, sandboxes, tasks
from store.database import Database
from store.rollouts import AttemptValues
from store.sandboxes import BoxOwner
from store.tasks import TaskRow


@dataclass(eq=False)
class BoxActivities:
    """Base of the stages of a rollout that use a box."""

    database: Database
    provider: SandboxProvider
    configs: RunConfigs


@dataclass(frozen=True, slots=True)
class StageContext:
    """One try of one stage. `fence`: number of this try in its attempt; None for grading, which writes no attempt."""

    input: StageInput
    sandbox_id: int
    provider_id: str
    config: RunConfig
    task: TaskRow
    fence: int | None

    @classmethod
    async def load(
        cls, database: Database, configs: RunConfigs, input: StageInput, *, use_box_as: str = "", fenced: bool = True
    ) -> Self:
        """Load the context in a transaction of its own; see `load_within`."""
        config = await configs.of_rollout(input.rollout_id)
        async with database.begin() as connection:
            return await cls.load_within(connection, config, input, use_box_as=use_box_as, fenced=fenced)

    @classmethod
    async def load_within(
        cls,
        connection: AsyncConnection,
        config: RunConfig,
        input: StageInput,
        *,
        use_box_as: str = "",
        fenced: bool = True,
    ) -> Self:
        """Load the context in the caller's transaction; the fence is taken only if that whole transaction commits.

        `use_box_as`: name of a stage that may use a box only once; the box is marked as used by this try. `fenced`:
        take a new fence, after which writes of earlier tries are refused. Raises FencedError if the attempt is
        superseded or the box another rollout's, SandboxGoneError, BoxSpentError if another try has used it.
        """
        assert input.sandbox_id is not None
        fence = await rollouts.take_fence(connection, input.rollout_id, input.attempt) if fenced else None
        info = activity.info()
        assert info.workflow_id is not None
        owner = BoxOwner(input.rollout_id, info.workflow_id)
        if use_box_as:
            user = f"{use_box_as}:{info.workflow_run_id}:{info.activity_id}:{info.attempt}"
            provider_id = await sandboxes.spend_sandbox(connection, input.sandbox_id, owner, user)
        else:
            provider_id = await sandboxes.live_provider_id(connection, input.sandbox_id, owner)
        task = await tasks.task_of_rollout(connection, input.rollout_id, input.datasets)
        task = task.with_network(config.sandbox.network)
        return cls(input, input.sandbox_id, provider_id, config, task, fence)

    @property
    def agent_user(self) -> str:
        return str(self.task.spec.get("agent_user") or self.config.harness.user)

    @property
    def agent_seconds(self) -> float:
        """The agent's time budget: that of the run, or a smaller one of the task."""
        wanted = float(self.task.spec.get("needed_settings", {}).get("limits.agent_seconds", math.inf))
        return min(self.config.limits.agent_seconds, wanted)

    async def write_attempt(self, connection: AsyncConnection, values: AttemptValues) -> None:
        """Write to the attempt's row. Raises FencedError if a later try of a stage has taken over."""
        assert self.fence is not None, "only a fenced stage writes to its attempt"
        await rollouts.write_attempt(connection, self.input.rollout_id, self.input.attempt, self.fence, values)
