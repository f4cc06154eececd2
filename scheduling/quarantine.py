"""Leave out tasks whose groups always fail, so that one broken task neither stops a run nor costs it boxes. No torch.

| state of a task in a run | condition | chosen for new groups |
|---|---|---|
| in use | fewer than MAX_FAILED_GROUPS groups in a row failed while most groups of other tasks succeeded | yes |
| in quarantine | at least so many did | no, until the run is resumed |

Groups that failed together with those of all other tasks say nothing about their task. The state is computed from the
groups whenever it is needed; `ratchet resume` makes earlier failures count no more.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from store import training_groups
from store.training_groups import FailedGroup

MAX_FAILED_GROUPS = 3


@dataclass(slots=True, frozen=True)
class QuarantinedTask:
    """A task that is left out. `reason`: why the newest of its failed groups got too few verdicts."""

    task_id: int
    label: str
    num_failures: int
    reason: str


async def quarantined_tasks(connection: AsyncConnection, run_id: str, groups_per_step: int) -> list[QuarantinedTask]:
    """Return the tasks of the run that are in quarantine now."""
    failed = await training_groups.failed_groups_since_resume(connection, run_id, groups_per_step)
    return choose_quarantined(failed)


def choose_quarantined(failed: Sequence[FailedGroup]) -> list[QuarantinedTask]:
    """Return the tasks that are in quarantine. `failed`: the failed groups of each task after its last success."""
    by_task: dict[int, list[FailedGroup]] = defaultdict(list)
    for group in failed:
        if group.others_succeeded:
            by_task[group.task_id].append(group)
    return [
        QuarantinedTask(task_id, groups[-1].task_label, len(groups), groups[-1].reason)
        for task_id, groups in by_task.items()
        if len(groups) >= MAX_FAILED_GROUPS
    ]
