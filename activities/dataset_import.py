"""Import datasets into the store, a chunk at a time, and choose the tasks that a run may take."""

import base64
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import islice
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.datasets.base import NeededSettings
from activities.datasets.formats import dataset_digest, read_rows
from grading.registry import GRADERS
from ratchet.config import DatasetConfig, RunConfig
from ratchet.errors import DatasetError
from sandboxes.build_context import BUILD_CONTEXT, check_build_context
from store import admissions, tasks
from store.admissions import GraderVersion
from store.tasks import NewTask

_CHUNK = 200
_MAX_LABELS, _MAX_CHARACTERS = 10, 4000
"""Of the message on unmet needs: Temporal limits the size of an activity's failure."""


async def import_dataset(
    connection: AsyncConnection,
    dataset: DatasetConfig,
    digest: str | None = None,
    offered: Mapping[str, object] | None = None,
) -> int:
    """Import rows that the store does not have yet, and return their number. The dataset is not held in memory.

    `offered`: settings by name, for `metadata.needed_settings`; one that is missing or None satisfies. Raises
    DatasetError that lists the rows that cannot be used or need more, and for a dataset without rows.
    """
    rows = offered_rows(dataset, digest or dataset_digest(dataset), offered or {})
    seen = 0
    added = 0
    while chunk := list(islice(rows, _CHUNK)):
        seen += len(chunk)
        await tasks.add_build_contexts(connection, _take_build_contexts(chunk))
        added += await tasks.import_tasks(connection, chunk)
    if not seen:
        raise DatasetError(f"{dataset.path}: is empty; expected at least one task")
    return added


def offered_rows(dataset: DatasetConfig, digest: str, offered: Mapping[str, object]) -> Iterator[NewTask]:
    """Yield the rows. Raises DatasetError as `read_rows` does, and at the end if rows need more than is offered."""
    unmet: dict[str, list[str]] = {}
    for row in read_rows(dataset, digest):
        for need in unmet_needs(row["spec"].get("needed_settings", {}), offered):
            unmet.setdefault(need, []).append(row["label"])
        yield row
    if unmet:
        listed = (f"{need}: {len(of)} tasks: {', '.join(of[:_MAX_LABELS])}" for need, of in unmet.items())
        text = "\n".join((f"{dataset.path}: tasks need what the settings do not allow", *listed))
        raise DatasetError(text[:_MAX_CHARACTERS])


def offers_of(config: RunConfig) -> dict[str, object]:
    """Return the settings of a run that can satisfy `metadata.needed_settings`, by name."""
    names = [str(field.alias) for field in NeededSettings.model_fields.values()]
    return {name: reduce(getattr, name.split("."), config) for name in names}


def unmet_needs(needs: Mapping[str, Any], offered: Mapping[str, Any]) -> list[str]:
    """Return each need that the offered settings do not satisfy, with the setting's value."""
    found = []
    for name, needed in needs.items():
        offer = offered.get(name)
        if offer is None:
            continue
        is_listed = isinstance(needed, list) and set(needed) <= set(offer)
        if not is_listed and (needed != offer if isinstance(needed, str | list) else needed > offer):
            found.append(f"{name} of {needed}, found {offer}")
    return found


def _take_build_contexts(rows: list[NewTask]) -> dict[str, bytes]:
    """Remove the archives of images that have to be built from the rows, and return them by image: every stage of a
    rollout reads its task, and none of them needs the archive."""
    taken: dict[str, bytes] = {}
    for row in rows:
        archive = row["spec"].pop(BUILD_CONTEXT, None)
        if archive is not None and row["image"] not in taken:
            taken[row["image"]] = _checked(row, archive)
    return taken


def _checked(row: NewTask, text: str) -> bytes:
    try:
        archive = base64.b64decode(text)
        check_build_context(row["image"], archive)
    except ValueError as error:
        raise DatasetError(f"{row['dataset']}: task {row['label']}: metadata.{BUILD_CONTEXT}: {error}") from None
    return archive


def grader_versions() -> list[GraderVersion]:
    return [GraderVersion(grader.name, grader.version) for grader in GRADERS.values()]


async def usable_task_ids(
    connection: AsyncConnection, dataset: DatasetConfig, digest: str, config: RunConfig
) -> list[int]:
    """Return the tasks that `grading.admission` allows a run, in file order. Raises DatasetError if none is left."""
    found = await tasks.tasks_of_dataset(connection, digest)
    chosen = [task.task_id for task in found if dataset.limit is None or task.row_no < dataset.limit]
    rule = config.grading.admission
    if rule == "ignored":
        return chosen
    examined = await admissions.admissions_of_dataset(connection, digest, grader_versions(), config.grading.user)
    usable = [
        task_id for task_id in chosen if (examined[task_id].admitted if task_id in examined else rule == "optional")
    ]
    if not usable:
        raise DatasetError(
            f"{dataset.path}: none of its {len(chosen)} tasks is admitted "
            f"({len(examined)} were examined by the present graders as {config.grading.user}); `ratchet tasks list` "
            f"has the reasons, `ratchet tasks admit {dataset.path}` examines them, grading.admission=ignored takes all"
        )
    return usable
