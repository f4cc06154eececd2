"""Datasets into the store: imported by digest, a chunk at a time, and filtered by what admission found.

Why here: the CLI, admission and runs import the same way.
Called by: `activities/admission.py`, `activities/run_lifecycle.py` and `ratchet tasks`.
"""

from itertools import islice
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.datasets.formats import dataset_digest, read_rows
from activities.graders.registry import GRADERS
from ratchet.config import DatasetConfig, RunConfig
from ratchet.errors import DatasetError
from ratchet.store import admissions, tasks

_CHUNK = 200


class NamesDataset(Protocol):
    """Whatever names a dataset and its columns."""

    @property
    def dataset(self) -> str: ...
    @property
    def input_key(self) -> str: ...
    @property
    def label_key(self) -> str: ...
    @property
    def metadata_key(self) -> str: ...


def dataset_of(named: NamesDataset) -> DatasetConfig:
    return DatasetConfig(
        path=named.dataset, input_key=named.input_key, label_key=named.label_key, metadata_key=named.metadata_key
    )


async def import_dataset(connection: AsyncConnection, dataset: DatasetConfig, digest: str | None = None) -> int:
    """Imports what is not there yet, without holding the dataset in memory; returns how many rows were new.

    Raises DatasetError at the first row that cannot be used, and for a dataset without rows.
    """
    rows = read_rows(dataset, digest or dataset_digest(dataset))
    seen = added = 0
    while chunk := list(islice(rows, _CHUNK)):
        seen += len(chunk)
        added += await tasks.import_tasks(connection, chunk)
    if not seen:
        raise DatasetError(f"{dataset.path}: is empty; expected at least one task")
    return added


async def usable(connection: AsyncConnection, dataset: DatasetConfig, digest: str, config: RunConfig) -> list[int]:
    """Ids of the tasks that a run may take, in file order, by `grading.admission`. Raises DatasetError where none is left."""
    found = await tasks.tasks_of_dataset(connection, digest)
    chosen = [(task_id, label) for task_id, label, number in found if dataset.limit is None or number < dataset.limit]
    if config.grading.admission == "ignored":
        return [task_id for task_id, _ in chosen]
    versions = [(grader.name, grader.version) for grader in GRADERS.values()]
    examined = await admissions.admissions_of_dataset(connection, digest, versions)
    admitted = [task_id for task_id, _ in chosen if task_id in examined and examined[task_id].admitted]
    if not admitted:
        raise DatasetError(
            f"{dataset.path}: none of its {len(chosen)} tasks is admitted ({len(examined)} were examined by the present graders); "
            f"run `ratchet tasks admit {dataset.path}`, or set grading.admission=ignored to take all"
        )
    return admitted
