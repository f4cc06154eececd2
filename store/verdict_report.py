"""Report on verdicts: how many solved ones are flagged or were rejected, and how many rollouts got none.

A policy can learn to take over tests, or to fail in a way that gives no verdict, so that the failure leaves its group.
Both show here first. The report is computed for every planned step.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.types import Outcome
from store.schema import BatchItemTable, GradeTable, RolloutTable

FLAGGED_SHARE = 0.2
"""Share of flagged verdicts among the solved ones of a step above which an alarm is raised, if there are at least 3."""
_MIN_FLAGGED = 3


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """Counts of a step's rollouts. `num_controlled`: verdicts with a control run; `num_rejected`: by any rule."""

    num_solved: int
    num_flagged: int
    num_controlled: int
    num_rejected: int
    num_ended: int
    num_without_verdict: int

    def numbers(self) -> dict[str, float]:
        """Return the values under their metric names."""
        return {
            "verdict_flagged_share": self.num_flagged / max(self.num_solved, 1),
            "verdict_controlled": float(self.num_controlled),
            "verdict_rejected": float(self.num_rejected),
            "verdict_missing_share": self.num_without_verdict / max(self.num_ended, 1),
        }

    @property
    def alarms(self) -> list[str]:
        """Sentences on what is out of the ordinary; empty if nothing is."""
        if self.num_flagged < _MIN_FLAGGED or self.num_flagged <= FLAGGED_SHARE * self.num_solved:
            return []
        return [
            f"{self.num_flagged} of {self.num_solved} solved rollouts are flagged; "
            "`ratchet show rollouts --flagged` lists them"
        ]


async def verdict_report(connection: AsyncConnection, run_id: str, step: int) -> VerdictReport:
    """Report on the groups that one step has consumed, in one query."""
    consumed = select(BatchItemTable.group_id).where(BatchItemTable.run_id == run_id, BatchItemTable.step == step)
    solved = GradeTable.solved
    statement = (
        select(
            func.count().filter(solved),
            func.count().filter(solved, func.jsonb_array_length(GradeTable.flags) > 0),
            func.count().filter(func.jsonb_typeof(GradeTable.control) == "array"),
            func.count().filter(GradeTable.rejected),
            func.count(RolloutTable.outcome),
            func.count().filter(RolloutTable.outcome == Outcome.GRADER_FAILED),
        )
        .select_from(RolloutTable)
        .outerjoin(GradeTable, GradeTable.id == RolloutTable.grade_id)
        .where(RolloutTable.run_id == run_id, RolloutTable.group_id.in_(consumed))
    )
    return VerdictReport(*(await connection.execute(statement)).one())
