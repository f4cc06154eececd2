"""Faults of graders and tasks: the verdicts of a run that turned out to be wrong, as a part of SQL statements."""

from dataclasses import dataclass
from datetime import datetime

DECIDED = """
planned AS MATERIALIZED (
  SELECT step, member.* FROM batch, jsonb_to_recordset(members)
    AS member(rollout_id bigint, group_id bigint, grade_id bigint, num_tokens bigint) WHERE run_id = :run_id),
decided AS (
  SELECT id AS rollout_id, grade_id FROM rollout WHERE run_id = :run_id AND outcome IS NOT NULL
  UNION SELECT rollout_id, grade_id FROM planned)
"""
"""CTEs: the members of a run's plan rows, and the verdicts on which the run rests. Those are in force on its ended
rollouts (NULL without a verdict), or its plan rows have them, also on rollouts of the run on whose groups it trains."""
FAULTY = f"""{DECIDED},
faulty AS MATERIALIZED (
  SELECT decided.*, group_id, task_id, solved AND NOT rejected AS is_solved,
    decided.grade_id IS NOT DISTINCT FROM rollout.grade_id AS is_in_force
  FROM decided JOIN rollout ON rollout.id = decided.rollout_id JOIN task ON task.id = task_id
  LEFT JOIN grade ON grade.id = decided.grade_id
  WHERE coalesce(grade.created_at, ended_at) >= coalesce(CAST(:since AS timestamptz), '-infinity') AND (
    label = :task OR rollout.id = ANY(CAST(:rollout_ids AS bigint[]))
    OR :grader IN (grade.grader, grade.grader || '@' || grader_version)
    OR grade.id IS NULL AND outcome = 'grader_failed' AND task.grader = :grader))
"""
"""CTEs: DECIDED, and its verdicts of a `Fault`, whose fields are the parameters. Of a task, rollouts that ended without
a verdict belong to them; of all versions of a grader, those of its tasks on which it failed."""


@dataclass(slots=True, frozen=True)
class Fault:
    """The source of wrong verdicts in a run: a task (its label), a grader (`eval_cmd`, or a version: `eval_cmd@5`), or
    the verdicts on some rollouts. `since`: only verdicts that were given then or later, None for all."""

    run_id: str
    since: datetime | None
    task: str | None = None
    grader: str | None = None
    rollout_ids: tuple[int, ...] = ()
