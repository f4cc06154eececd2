"""Build the images of a dataset whose tasks come with Dockerfiles, before a run needs them."""

import asyncio
from dataclasses import dataclass

from activities.dataset_import import import_dataset
from activities.datasets.formats import dataset_digest, read_rows
from client.workflows import run_workflow
from ratchet.built_images import build_workflow_id, is_built
from ratchet.config import DatasetConfig
from ratchet.errors import ConfigError
from ratchet.image_payloads import BuildImageInput, BuildImageResult
from ratchet.progress import CountedLine, ReportProgress
from ratchet.temporal_settings import load_temporal_settings
from stack.parts import Stack
from stack.startup import connect_stack

_AT_ONCE = 8


@dataclass(slots=True, frozen=True)
class BuiltImage:
    """One image. `tasks`: the labels of those that have it. `failure`: why it could not be built, else empty."""

    image: str
    tasks: tuple[str, ...]
    seconds: float
    failure: str = ""


async def build_dataset_images(stack: Stack, dataset: DatasetConfig, say: ReportProgress) -> list[BuiltImage]:
    """Import the dataset, build every image of it that comes as a Dockerfile, and return one result per image.

    What is built already costs the builder a look at its layers. Raises DatasetError for a row that cannot be used,
    MachineError if the stack is stopped.
    """
    settings = load_temporal_settings()
    await connect_stack(stack, settings)  # refuses at once if the stack is stopped
    digest = await asyncio.to_thread(dataset_digest, dataset)
    async with stack.database() as database, database.begin() as connection:
        await import_dataset(connection, dataset, digest)
    tasks: dict[str, list[str]] = {}
    for row in read_rows(dataset, digest):
        if is_built(row["image"]):
            tasks.setdefault(row["image"], []).append(row["label"])
    stage = settings.image_options()
    limit, results = asyncio.Semaphore(_AT_ONCE), list[BuiltImage]()

    async def build(image: str) -> None:
        async with limit:
            results.append(await _build(stack, BuildImageInput(image=image, stage=stage), tuple(tasks[image]), say))
            say(CountedLine(f"{len(results)} of {len(tasks)} images", "images", len(results), len(tasks)))

    await asyncio.gather(*(build(image) for image in tasks))
    return sorted(results, key=lambda built: built.tasks)


async def _build(stack: Stack, wanted: BuildImageInput, tasks: tuple[str, ...], say: ReportProgress) -> BuiltImage:
    try:
        built = await run_workflow(stack, "BuildImage", wanted, build_workflow_id(wanted.image), BuildImageResult, say)
    except ConfigError as error:
        return BuiltImage(wanted.image, tasks, 0.0, str(error))
    return BuiltImage(wanted.image, tasks, built.seconds)
