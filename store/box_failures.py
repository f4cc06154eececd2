"""The numbers of boots and grades that failed lately, counted from the ledger of boxes.

A failed boot is a box whose newest try failed, or whose first create call has not returned for `HANGING`. A failed
grade is a box for grading, or for a control run, that was released without a result. Waiting for a free box is no boot.
"""

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import SandboxRole, SandboxState
from store.schema import SandboxTable

WINDOW = timedelta(minutes=5)
HANGING = timedelta(minutes=3)
VERDICT_STORED = "verdict stored"
"""Release reason of a grading box that gave a verdict."""
NO_VERDICT = "no verdict"
"""Release reason of a grading box that gave none."""
SUSPECT_PATCH = "suspect patch"
"""Release reason of a grading box that could not run the tests of a patch. Most such patches are to blame, so it says
nothing about the sandbox service."""
ENDED_BY_HOST = "worker's machine"
"""Release reason of a box whose try was ended by its worker's machine: the rollout's guard does not count it."""
_OLDEST = timedelta(minutes=30)
"""A box is released at most so long after its creation if it counts; older rows are not read."""


@dataclass(slots=True, frozen=True)
class BoxCounts:
    """Boots and grades that ended within `WINDOW`, and boots that fail now. `boot_error`: one of their errors."""

    boots: int
    failed_boots: int
    grades: int
    failed_grades: int
    boot_error: str


async def count_boxes(connection: AsyncConnection) -> BoxCounts:
    """Count the boots and grades of all runs of this installation, because they share the sandbox service."""
    since = func.now() - WINDOW
    is_creating = SandboxTable.state == SandboxState.CREATING
    has_failed = SandboxTable.boot_error != ""  # neither NULL nor empty: the service had room and no box came
    hangs = is_creating & SandboxTable.boot_error.is_(None) & (SandboxTable.created_at < func.now() - HANGING)
    failing = is_creating & has_failed
    given_up = has_failed & (SandboxTable.released_at > since)
    failed_boot = hangs | failing | given_up
    graded = (SandboxTable.role == SandboxRole.GRADE) & (SandboxTable.released_at > since)
    failed_grade = graded & (SandboxTable.release_reason == NO_VERDICT)
    an_error = func.max(SandboxTable.boot_error).filter(failed_boot)
    statement = select(
        func.count().filter(failed_boot | (SandboxTable.live_at > since)),
        func.count().filter(failed_boot),
        func.count().filter(failed_grade | (graded & (SandboxTable.release_reason == VERDICT_STORED))),
        func.count().filter(failed_grade),
        an_error,
    ).where(is_creating | (SandboxTable.created_at > func.now() - _OLDEST))
    row = (await connection.execute(statement)).one()
    return BoxCounts(row[0], row[1], row[2], row[3], boot_error=row[4] or "")
