"""The BuildImage workflow: build the image of tasks that come with a Dockerfile. Its id has the digest of the files."""

from pydantic import ValidationError
from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.image_builds import ImageBuildActivities
    from ratchet.image_payloads import BuildImageInput, BuildImageResult
    from workflows.activity_options import run_activity


@workflow.defn(name="BuildImage", failure_exception_types=[ValidationError])
class BuildImage:
    """Runs the build once; the heartbeat of its activity has the newest line of the build's output."""

    @workflow.run
    async def run(self, input: BuildImageInput) -> BuildImageResult:
        return await run_activity(ImageBuildActivities.build_image, input, input.stage, input.image)
