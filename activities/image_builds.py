"""Build the images of tasks that come with a Dockerfile: one workflow per image, for which every box of it waits.

| state    | what says so                                   | what leads out of it                                     |
|----------|------------------------------------------------|----------------------------------------------------------|
| missing  | the service does not know the image (`create`) | the boot that finds it so starts workflow `image/DIGEST` |
| building | that workflow is open                          | it ends: present, or failed                              |
| present  | the service makes boxes of it                  | somebody removes the image: missing                      |
| failed   | that workflow has failed                       | a boot 15 minutes later; `ratchet tasks images build`    |

Nothing else records the state, so nothing can contradict the service. A boot that waits gives its box's place and its
slot back, and asks again every few seconds. A failed build is tried again later, because a mirror or a registry that is
away fails it like a mistake in the Dockerfile.
"""

import asyncio
import time
from collections import deque
from datetime import UTC, datetime
from typing import NoReturn

from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.service import RPCError

from activities.stage import activity_stage, heartbeating
from ratchet.built_images import build_workflow_id
from ratchet.errors import BuildFailedError, ConfigError, SandboxBusyError, SandboxFullError, TemporalUnavailableError
from ratchet.image_payloads import BuildImageInput, BuildImageResult
from ratchet.payload_codec import PayloadKeyError
from ratchet.secrets import without_secrets
from ratchet.temporal_client import WorkflowState, describe_workflow, root_cause
from ratchet.temporal_settings import TemporalSettings
from sandboxes.base import ImageBuilder
from store import tasks
from store.database import Database

_ASK_AGAIN_SECONDS = 5.0
_JUST_BUILT_SECONDS, _FAILED_SECONDS = 60.0, 900.0
_BUILD_SECONDS = 6000.0
"""Limit of one try, below that of the activity, so that a step which hangs ends as a failure of the Dockerfile."""
_TRIES, _TRY_AGAIN_SECONDS = 3, 5.0
"""A build step may fail because of a mirror or a registry, which looks like the Dockerfile's own mistake."""
_KEPT_LINES, _MAX_CHARS = 20, 600


class ImageBuilds:
    """Starts the builds of missing images, and says how they stand."""

    def __init__(self, client: Client, settings: TemporalSettings) -> None:
        self.client = client
        self.settings = settings
        self._under_way: dict[str, float] = {}  # image -> until when it need not be asked for again, monotonic clock

    def require_not_under_way(self, image: str) -> None:
        """Raise SandboxFullError if the image was under way a moment ago, without asking anew: many boots may wait."""
        if time.monotonic() < self._under_way.get(image, 0.0):
            raise self._is_building(image)

    def _is_building(self, image: str) -> SandboxFullError:
        workflow_id = self.settings.own(build_workflow_id(image))
        words = f"image {image} is being built by workflow {workflow_id}"
        return SandboxFullError(words, _ASK_AGAIN_SECONDS)

    async def raise_state(self, image: str) -> NoReturn:
        """Start the build of an image that the service does not have, unless it is under way. Raises SandboxFullError
        while it is built, ConfigError if its newest build failed, and TemporalUnavailableError."""
        workflow_id = self.settings.own(build_workflow_id(image))
        try:
            found = await describe_workflow(self.client, workflow_id)
            info = found.workflow_execution_info if found is not None else None
            state = WorkflowState(info.status) if info is not None else None
            # What a person has cancelled or terminated was not the Dockerfile's failure.
            if info is not None and state in (WorkflowState.COMPLETED, WorkflowState.FAILED):
                await self._require_old(image, workflow_id, info, has_failed=state is WorkflowState.FAILED)
            if state is None or not state.is_open:
                await self._start(image, workflow_id)
        except (RPCError, PayloadKeyError) as error:
            raise TemporalUnavailableError(f"Temporal cannot tell about {workflow_id}: {error}") from error
        self._under_way[image] = time.monotonic() + _ASK_AGAIN_SECONDS
        raise self._is_building(image)

    async def _require_old(self, image: str, workflow_id: str, info: WorkflowExecutionInfo, has_failed: bool) -> None:
        """Raise ConfigError if a recent build failed, else SandboxFullError: the service should know the image."""
        ended_at = info.close_time.ToDatetime(UTC)
        age = (datetime.now(UTC) - ended_at).total_seconds()
        if has_failed and age < _FAILED_SECONDS:
            raise ConfigError(
                f"image {image} cannot be built: {await self._failure(workflow_id, info.execution.run_id)}; mend its "
                "Dockerfile and import the tasks again, or try again with `ratchet tasks images build`"
            )
        if not has_failed and age < _JUST_BUILT_SECONDS:
            raise SandboxFullError(
                f"image {image} was built at {ended_at:%H:%M:%S} UTC, and the sandbox service does not have it: "
                "workers of queue `image` must run beside the service's gateway or daemon only",
                _ASK_AGAIN_SECONDS,
            )

    async def _failure(self, workflow_id: str, run_id: str) -> str:
        try:
            await self.client.get_workflow_handle(workflow_id, run_id=run_id).result()
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


class ImageBuildActivities:
    """The activity that builds. `builder` None: nothing builds for this provider of boxes."""

    def __init__(self, database: Database, builder: ImageBuilder | None) -> None:
        self.database = database
        self.builder = builder

    @activity_stage("build_image")
    async def build_image(self, input: BuildImageInput) -> BuildImageResult:
        """Build the image and give it to the service. Raises ConfigError, with the last output, after three tries."""
        if self.builder is None:
            raise ConfigError(
                "images for this sandbox provider are not built here: build one from the task's environment/Dockerfile "
                "with the provider's own tools, and name it by environment.docker_image in task.toml"
            )
        context = await self.database.run(tasks.read_build_context, input.image)
        if context is None:
            raise ConfigError("no imported task has its Dockerfile; import the dataset again")
        started = time.monotonic()
        lines = BuildLines()
        async with heartbeating(lines.newest):
            for tries_left in reversed(range(_TRIES)):
                try:
                    async with asyncio.timeout(_BUILD_SECONDS):
                        await self.builder.build(input.image, context, lines.add)
                    break
                except TimeoutError:
                    raise ConfigError(f"its build has not ended after {_BUILD_SECONDS:.0f} s: {lines.end()}") from None
                except ValueError as error:
                    raise ConfigError(str(error)) from error
                except OSError as error:  # this machine's disk is full, for example
                    raise SandboxBusyError(f"{input.image} cannot be built now: {error}", 60.0) from error
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
        shown = without_secrets(text)  # before a line is cut, which could leave a part of one
        self._lines.extend(line.strip() for line in shown.splitlines() if line.strip())

    async def newest(self) -> str:
        return self._lines[-1][:_MAX_CHARS] if self._lines else "the build begins"

    def end(self) -> str:
        """Return the last lines as one, the cause of a failure among them."""
        return " | ".join(self._lines)[-_MAX_CHARS:]
