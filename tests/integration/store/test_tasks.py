"""Imports of datasets: the newest one decides what a task is."""

from pathlib import Path
from uuid import uuid4

from activities.dataset_import import import_dataset
from activities.datasets.formats import dataset_digest
from ratchet.config import DatasetConfig
from store import tasks
from store.database import Database
from tests.integration.grading.harbor_tasks import TASKS


async def test_the_newest_import_of_a_harbor_folder_decides_what_its_task_is(
    database: Database, tmp_path: Path
) -> None:
    folder = TASKS["a variable of the environment, a helper of the tests"].write(tmp_path / uuid4().hex)
    config = DatasetConfig(path=str(folder))
    helper = folder / "tests/lib/check.sh"
    held: dict[int, int] = {}
    for mode, new in ((0o644, 1), (0o755, 1), (0o644, 0), (0o644, 0), (0o755, 0), (0o644, 0)):
        helper.chmod(mode)
        digest = dataset_digest(config)
        async with database.begin() as connection:
            assert await import_dataset(connection, config) == new
            (found,) = await tasks.tasks_of_dataset(connection, digest)
            assert held.setdefault(mode, found.task_id) == found.task_id, oct(mode)
            assert await tasks.page_of_tasks(connection, digest, -1, 10, [], None) == [found]
            (listed,) = await tasks.list_tasks(connection, config.path, 10)
            shown = await tasks.show_task(connection, found.label)
            assert shown is not None and listed["id"] == shown["id"] == found.task_id
    assert len(held) == 2
