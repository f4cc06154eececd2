"""The extent of wrong verdicts in a run, the cost of putting them right, and the runs that did: `ratchet recall`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.suggestions import did_you_mean
from ratchet.types import JsonObject
from reads.runs import require_run
from store.names import Kind, require_named

_DECIDED = """
planned AS MATERIALIZED (
  SELECT step, member.* FROM batch, jsonb_to_recordset(members)
    AS member(rollout_id bigint, group_id bigint, grade_id bigint, num_tokens bigint) WHERE run_id = :run_id),
decided AS (
  SELECT id AS rollout_id, grade_id FROM rollout WHERE run_id = :run_id AND outcome IS NOT NULL
  UNION SELECT rollout_id, grade_id FROM planned)
"""
"""CTEs: the members of a run's plan rows, and the verdicts on which the run rests. Those are in force on its ended
rollouts (NULL without a verdict), or its plan rows have them, also on rollouts of the run on whose groups it trains."""
_FAULTY = f"""{_DECIDED},
faulty AS MATERIALIZED (
  SELECT decided.*, rollout.run_id AS owner, group_id, task_id, solved AND NOT rejected AS is_solved,
    decided.grade_id IS NOT DISTINCT FROM rollout.grade_id AS is_in_force
  FROM decided JOIN rollout ON rollout.id = decided.rollout_id JOIN task ON task.id = task_id
  LEFT JOIN grade ON grade.id = decided.grade_id
  WHERE coalesce(grade.created_at, ended_at) >= coalesce(CAST(:since AS timestamptz), '-infinity')
    AND (coalesce(grade.created_at, ended_at) < coalesce(CAST(:before AS timestamptz), 'infinity')
      OR ended_at >= CAST(:before AS timestamptz)) AND (
    label = :task OR spec->>'family' = :family OR rollout.id = ANY(CAST(:rollout_ids AS bigint[]))
    OR :grader IN (grade.grader, grade.grader || '@' || grader_version)
    OR grade.id IS NULL AND outcome = 'grader_failed' AND task.grader = :grader))
"""
"""CTEs: those, and the verdicts of a task, a family, a grader or some rollouts, by the parameters. Of tasks, rollouts
that ended without a verdict belong to them; of all versions of a grader, those of its tasks on which it failed."""
_KNOWN = f"""
WITH {_DECIDED} SELECT DISTINCT spec->>'family' AS family, task.grader, grade.grader AS judge,
  grade.grader || '@' || grader_version AS version
FROM decided JOIN rollout ON rollout.id = decided.rollout_id JOIN task ON task.id = task_id
LEFT JOIN grade ON grade.id = decided.grade_id
"""
_EXTENT = f"""
WITH RECURSIVE {_FAULTY},
judged AS (  -- once per rollout
  SELECT DISTINCT ON (rollout_id) faulty.*,
    CASE WHEN CAST(:rollout_ids AS bigint[]) = '{{}}' THEN coalesce(g.workflow_id, r.workflow_id)
      ELSE r.workflow_id END AS name,
    EXISTS (SELECT FROM patch WHERE patch.rollout_id = r.id) AS has_patch,
    CAST(timings->>'grade' AS float8) + coalesce(CAST(timings->>'control_run' AS float8), 0) AS seconds
  FROM faulty JOIN rollout r ON r.id = rollout_id LEFT JOIN rollout_group g ON g.id = r.group_id
  ORDER BY rollout_id, is_in_force DESC),
trained AS (  -- a member is touched by the verdict that it was planned with
  SELECT step, sum(num_tokens) AS tokens, sum(num_tokens) FILTER (WHERE faulty.rollout_id IS NOT NULL) AS own,
    count(faulty.rollout_id) AS touched, count(*) AS members
  FROM planned LEFT JOIN faulty ON faulty.rollout_id = planned.rollout_id
    AND faulty.grade_id IS NOT DISTINCT FROM planned.grade_id
  GROUP BY step, planned.group_id),
first AS (SELECT min(step) AS step FROM trained WHERE touched > 0),
clean AS (SELECT max(c.step) AS step FROM checkpoint c, first WHERE run_id = :run_id AND c.step < first.step),
start AS (
  SELECT max(v.step) AS step FROM policy_version v JOIN run USING (run_id), clean  -- no run begins from an adapter
  WHERE run_id = :run_id AND v.state = 'published' AND v.step BETWEEN 1 AND clean.step
    AND config->'training'->>'lora' IS NULL),
again AS (SELECT trained.* FROM trained, first, start WHERE first.step > 0 AND trained.step > coalesce(start.step, 0)),
evaluated AS (
  SELECT e.label, e.step, count(*) AS num_counted,
    count(*) FILTER (WHERE r.id IN (SELECT rollout_id FROM faulty WHERE is_in_force)) AS num_touched
  FROM evaluation e JOIN rollout_group g ON (g.run_id, g.purpose, g.label) = (e.run_id, 'eval', e.label)
  JOIN rollout r ON r.group_id = g.id
  WHERE e.run_id = :run_id AND r.replaced_by IS NULL AND r.reward IS NOT NULL GROUP BY e.label, e.step),
descendant AS (
  SELECT CAST(:run_id AS text) AS run_id, '' AS cause, step FROM first
  UNION SELECT g.run_id, 'forks touched rollouts', NULL FROM rollout_group g JOIN turn ON turn.id = forked_turn_id
    WHERE g.run_id <> :run_id AND turn.rollout_id IN (SELECT rollout_id FROM faulty)
  UNION SELECT run_id, 'trains on stored groups of ' || :run_id, min(batch.step) FROM batch JOIN run USING (run_id),
      jsonb_to_recordset(members) AS member(rollout_id bigint, grade_id bigint)
    WHERE (run_id, batch.step) IN (SELECT run_id, step FROM batch_item JOIN faulty USING (group_id))
      AND run_id <> :run_id AND EXISTS (SELECT FROM faulty WHERE faulty.rollout_id = member.rollout_id
      AND faulty.grade_id IS NOT DISTINCT FROM member.grade_id
      AND :run_id IN (owner, split_part(init_from, '@', 1))) GROUP BY run_id
  UNION SELECT run.run_id, CASE WHEN source_run_id = parent.run_id AND parent.run_id <> :run_id
      THEN 'trains on stored groups of ' || source_run_id ELSE 'begins from ' || init_from END, 0
    FROM run JOIN descendant parent ON source_run_id = parent.run_id AND parent.run_id <> :run_id
      OR split_part(init_from, '@', 1) = parent.run_id
        AND CAST(substring(init_from FROM '@([0-9]{{1,9}})$') AS int) >= parent.step)
SELECT count(DISTINCT task_id) AS num_tasks, count(DISTINCT group_id) AS num_groups, count(*) AS num_rollouts,
  count(*) FILTER (WHERE is_solved) AS num_solved, count(*) FILTER (WHERE NOT is_solved) AS num_not_solved,
  count(*) FILTER (WHERE is_solved IS NULL) AS num_without_verdict, count(*) FILTER (WHERE has_patch) AS num_patches,
  coalesce(avg(seconds), 0) * count(*) FILTER (WHERE has_patch) AS grading_seconds,
  coalesce(array_agg(DISTINCT name) FILTER (WHERE has_patch), '{{}}') AS to_grade,
  coalesce(array_agg(DISTINCT task_id), '{{}}') AS task_ids, statement_timestamp() AS read_at,
  (SELECT count(*) FROM trained WHERE touched > 0) AS num_trained_groups,
  (SELECT count(*) FROM trained WHERE touched BETWEEN 1 AND members - 1) AS num_partly_touched,
  (SELECT CAST(coalesce(sum(tokens), 0) AS bigint) FROM trained WHERE touched > 0) AS num_trained_tokens,
  (SELECT CAST(coalesce(sum(own), 0) AS bigint) FROM trained) AS num_own_tokens,
  (SELECT step FROM first) AS first_step, (SELECT step FROM clean) AS clean_checkpoint,
  (SELECT step FROM start) AS start_step, (SELECT count(DISTINCT step) FROM trained WHERE touched > 0) AS num_steps,
  (SELECT count(DISTINCT step) FROM again) AS num_steps_again,
  (SELECT CAST(coalesce(sum(tokens), 0) AS bigint) FROM again) AS num_tokens_again,
  (SELECT coalesce(json_agg(evaluated ORDER BY step, label), '[]') FROM evaluated WHERE num_touched > 0) AS evaluations,
  (SELECT coalesce(json_object_agg(run_id, cause ORDER BY run.created_at), '{{}}')
    FROM descendant JOIN run USING (run_id) WHERE cause <> '') AS descendants,
  CASE WHEN bool_and(owner = :run_id) THEN (SELECT count(DISTINCT rollout_id) FROM patch JOIN rollout r
    ON r.id = rollout_id WHERE run_id = :run_id) END AS of_run
FROM judged
"""
_RETRAINED = """
WITH again AS MATERIALIZED (
  SELECT run_id, init_from, created_at, split_part(init_from, '@', 1) AS source FROM run
  WHERE init_from IS NOT NULL AND :run_id IN (run_id, split_part(init_from, '@', 1))
    AND CAST(config->>'retrain' AS bool))
SELECT again.run_id, init_from, max(step) AS last, count(step) AS groups, count(*) FILTER (WHERE is_changed) AS changed,
  array_agg(workflow_id ORDER BY id) FILTER (WHERE was_trained AND use <> 'trained') AS lost,
  array_agg(workflow_id ORDER BY id) FILTER (WHERE was_trained AND use IS NULL) AS left_out
FROM again LEFT JOIN LATERAL (
  SELECT mine.step, mine.use, mine.rewards <> theirs.rewards AS is_changed, theirs.use = 'trained' AS was_trained,
    workflow_id, g.id
  FROM batch_item theirs JOIN rollout_group g ON g.id = theirs.group_id
  LEFT JOIN batch_item mine ON (mine.run_id, mine.group_id) = (again.run_id, theirs.group_id)
  WHERE theirs.run_id = again.source AND theirs.step > CAST(substring(init_from FROM '@([0-9]{1,9})$') AS int)
) AS item ON true
GROUP BY again.run_id, init_from, again.created_at ORDER BY again.created_at
"""


@dataclass(slots=True, frozen=True)
class TouchedEvaluation:
    """`num_counted`: the rollouts that its mean is over; `num_touched`: of these, those with a faulty verdict."""

    label: str
    step: int
    num_counted: int
    num_touched: int


@dataclass(slots=True, frozen=True)
class Recall:
    """The extent of a `fault`. The first are of ended rollouts with a faulty verdict, in force or used by a step.

    `num_trained_groups`: those in plan rows with such a rollout, on which the advantages of all members rest, and
    `num_trained_tokens`: those of all members; `num_own_tokens`: those of such rollouts; `num_partly_touched`: groups
    that have other members, too. `clean_checkpoint`: the newest before the first step planned with them; `start_step`:
    the newest step up to it whose full weights are published; None: the run's first weights. `descendants`: runs that
    rest on weights of a touched step or on touched rollouts, and why. `num_steps_again`, `num_tokens_again`: planned
    after `start_step`. `to_grade`: the run, or groups or rollouts, that are graded again in about `grading_seconds`.
    `task_ids`: the tasks of these rollouts. `read_at`: the time of all this, by the store's clock.
    """

    run_id: str
    since: datetime | None
    fault: JsonObject
    num_tasks: int
    num_groups: int
    num_rollouts: int
    num_solved: int
    num_not_solved: int
    num_without_verdict: int
    num_trained_groups: int
    num_partly_touched: int
    num_trained_tokens: int
    num_own_tokens: int
    first_step: int | None
    num_steps: int
    clean_checkpoint: int | None
    start_step: int | None
    evaluations: list[TouchedEvaluation]
    descendants: dict[str, str]
    num_patches: int
    grading_seconds: float
    num_steps_again: int
    num_tokens_again: int
    to_grade: list[str]
    task_ids: list[int]
    read_at: datetime


async def read_recall(
    connection: AsyncConnection,
    run: str,
    task: str | None = None,
    grader: str | None = None,
    rollouts: Sequence[str] = (),
    since: datetime | None = None,
    family: str | None = None,
) -> Recall:
    """Return what rests on the verdicts of a task, of a family of tasks, of a grader (`eval_cmd`, or one version:
    `eval_cmd@5`) or of some rollouts, by their names.

    `since`: only verdicts since then; in this machine's zone if it has none. Raises ConfigError for an unknown name.
    """
    if [bool(one) for one in (task, family, grader, rollouts)].count(True) != 1:
        raise ConfigError("name one of --task, --family, --grader and --rollout")
    head = await require_run(connection, run)
    task = (await require_named(connection, task, Kind.TASK)).name if task else None
    if grader or family:
        await _require_known(connection, head.run_id, grader, family)
    ids = sorted([await _rollout_id(connection, head.run_id, one) for one in rollouts])
    since = since and since.astimezone(UTC)
    fault: JsonObject = {"task": task, "family": family, "grader": grader, "rollout_ids": ids, "since": since}
    fault["run_id"] = head.run_id
    return await read_extent(connection, fault)


async def read_extent(connection: AsyncConnection, fault: JsonObject, before: datetime | None = None) -> Recall:
    """Return what rests on the verdicts of a fault of `Recall`. `before`: without those that replaced one after it."""
    values = dict((await connection.execute(text(_EXTENT), fault | {"before": before})).one()._mapping)
    if values.pop("of_run") == values["num_patches"] > 0:  # all of its own, and no others
        values["to_grade"] = [fault["run_id"]]
    values["evaluations"] = [TouchedEvaluation(**one) for one in values["evaluations"]]
    return Recall(fault["run_id"], fault["since"], fault, **values)


async def retrained_runs(connection: AsyncConnection, run_id: str) -> list[str]:
    """Return a sentence on each run that trains steps of this one again, and on this one if it does so itself."""
    found = []
    for row in await connection.execute(text(_RETRAINED), {"run_id": run_id}):
        source = row.init_from.rpartition("@")[0]
        again = f"{row.groups} groups of {source} in steps 1 to {row.last}, {row.changed} with other rewards"
        lost = f" ({len(row.lost)} lost their signal: {', '.join(row.lost)})" if row.lost else ""
        passed = row.left_out or []
        names = ", ".join(passed[:3]) + ", …" * (len(passed) > 3)
        left_out = f"; {len(passed)} of its trained groups not trained again: {names}" if passed else ""
        samples = f"{left_out}; it samples anew from step {(row.last or 0) + 1} on"
        found.append(f"{row.run_id} begins from {row.init_from}: {again if row.last else 'no group'}{lost}{samples}")
    return found


async def _require_known(connection: AsyncConnection, run_id: str, grader: str | None, family: str | None) -> None:
    rows = (await connection.execute(text(_KNOWN), {"run_id": run_id})).all()
    known = {name for row in rows for name in ([row.family] if family else row[1:]) if name}
    if (name := family or grader or "") not in known:
        what = "of a family" if family else "judged by a grader"
        there = did_you_mean(name, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"no rollout of run {run_id} is {what} {name!r}{there}")


async def _rollout_id(connection: AsyncConnection, run_id: str, name: str) -> int:
    """Return the rollout's id. Raises ConfigError if it is not one on which the run rests."""
    named = await require_named(connection, name, Kind.ROLLOUT)
    rests = text(f"WITH {_DECIDED} SELECT :id IN (SELECT rollout_id FROM decided)")
    if named.run_id != run_id and not await connection.scalar(rests, {"run_id": run_id, "id": named.id}):
        raise ConfigError(f"{name!r} is a rollout of run {named.run_id}, and run {run_id} does not rest on it")
    return named.id
