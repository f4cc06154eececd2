"""Build the images of tasks that come with a Dockerfile: one workflow per image, for which every box of it waits.

| state    | what says so                                   | what leads out of it                                     |
|----------|------------------------------------------------|----------------------------------------------------------|
| missing  | the service does not know the image (`create`) | the boot that finds it so starts workflow `image/DIGEST` |
| building | that workflow is open                          | it ends: present, or failed                              |
| present  | the service makes boxes of it                  | somebody removes the image: missing                      |
| failed   | that workflow has ended without a result       | `ratchet images build` starts it again: building         |

Nothing else records the state, so nothing can contradict the service. A boot that waits gives its box's place and its
slot back, and asks again every few seconds.
"""

import asyncio
import time
from collections import deque
from datetime import UTC, datetime
from typing import NoReturn

from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.sandboxes.base import BuildFailedError, ImageBuilder
from activities.stage import activity_stage, heartbeating
from ratchet.built_images import build_workflow_id
from ratchet.errors import ConfigError, SandboxBusyError, TemporalUnavailableError
from ratchet.image_payloads import BuildImageInput, BuildImageResult
from ratchet.store import build_contexts
from ratchet.store.database import Database
from ratchet.temporal_client import WorkflowState, describe_workflow, root_cause
from ratchet.temporal_settings import TemporalSettings

_ASK_AGAIN_SECONDS = 5.0
_JUST_BUILT_SECONDS = 60.0
_TRIES, _TRY_AGAIN_SECONDS = 3, 5.0
"""A build step may fail because of a mirror or a registry, which looks like the Dockerfile's own mistake."""
_KEPT_LINES, _MAX_CHARS = 20, 600


class ImageBuilds:
    """Starts the builds of missing images, and says how they stand."""

    def __init__(self, client: Client, settings: TemporalSettings) -> None:
        self.client = client
        self.settings = settings

    async def raise_state(self, image: str) -> NoReturn:
        """Start the build of an image that the service does not have, unless it is under way.

        Raises SandboxBusyError while the image is built, ConfigError if its newest build has failed, and
        TemporalUnavailableError.
        """
        workflow_id = self.settings.own(build_workflow_id(image))
        try:
            found = await describe_workflow(self.client, workflow_id)
            info = found.workflow_execution_info if found is not None else None
            state = WorkflowState(info.status) if info is not None else None
            if info is not None and state is WorkflowState.COMPLETED:
                _require_old(image, info.close_time.ToDatetime(UTC))
            elif state is not None and not state.is_open:
                raise ConfigError(
                    f"image {image} cannot be built: {await self._failure(workflow_id)}; mend its Dockerfile and "
                    "import the tasks again, or try again with `ratchet images build`"
                )
            if state is None or not state.is_open:
                await self._start(image, workflow_id)
        except RPCError as error:
            raise TemporalUnavailableError(f"Temporal cannot tell about {workflow_id}: {error.message}") from error
        raise SandboxBusyError(
            f"image {image} is being built by workflow {workflow_id}", _ASK_AGAIN_SECONDS, is_full=True
        )

    async def _failure(self, workflow_id: str) -> str:
        try:
            await self.client.get_workflow_handle(workflow_id).result()
        except WorkflowFailureError as error:
            return root_cause(error)
        return "its build was ended"

    async def _start(self, image: str, workflow_id: str) -> None:
        await self.client.start_workflow(
            "BuildImage",
            BuildImageInput(image=image, stage=self.settings.image_options()),
            id=workflow_id,
            task_queue=self.settings.own("control"),
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )


def _require_old(image: str, built_at: datetime) -> None:
    """Raise SandboxBusyError if the image was built a moment ago: the service should know it."""
    if (datetime.now(UTC) - built_at).total_seconds() < _JUST_BUILT_SECONDS:
        raise SandboxBusyError(
            f"image {image} was built at {built_at:%H:%M:%S} UTC, and the sandbox service does not have it: a worker "
            "of queue `image` must run beside the service's gateway or daemon",
            _ASK_AGAIN_SECONDS,
            is_full=True,
        )


class ImageBuildActivities:
    """The activity that builds. `builder` None: nothing builds for this provider of boxes."""

    def __init__(self, database: Database, builder: ImageBuilder | None) -> None:
        self.database = database
        self.builder = builder

    @activity_stage("build_image")
    async def build_image(self, input: BuildImageInput) -> BuildImageResult:
        """Build the image and give it to the service. Raises ConfigError, with the end of the build's output, if it
        fails three times.
        """
        if self.builder is None:
            raise ConfigError(
                "images for this sandbox provider are not built here: build one from the task's environment/Dockerfile "
                "with the provider's own tools, and name it by environment.docker_image in task.toml"
            )
        async with self.database.begin() as connection:
            context = await build_contexts.read_build_context(connection, input.image)
        if context is None:
            raise ConfigError("no imported task has its Dockerfile; import the dataset again")
        started = time.monotonic()
        lines = BuildLines()
        async with heartbeating(lines.newest):
            for tries_left in reversed(range(_TRIES)):
                try:
                    await self.builder.build(input.image, context, lines.add)
                    break
                except BuildFailedError as error:
                    if not tries_left:
                        raise ConfigError(f"{error}: {lines.end()}") from error
                    lines.add(f"{error}; it is tried again")
                    await asyncio.sleep(_TRY_AGAIN_SECONDS)
        return BuildImageResult(image=input.image, seconds=round(time.monotonic() - started, 1))


class BuildLines:
    """The newest lines that a build has printed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def add(self, text: str) -> None:
        self._lines.extend(line.strip() for line in text.splitlines() if line.strip())

    async def newest(self) -> str:
        """Return the newest line, for the heartbeat's details."""
        return self._lines[-1][:_MAX_CHARS] if self._lines else "the build begins"

    def end(self) -> str:
        """Return the last lines as one, the cause of a failure among them."""
        return " | ".join(self._lines)[-_MAX_CHARS:]
