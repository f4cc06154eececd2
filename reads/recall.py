"""The extent of wrong verdicts in a run, and the cost of putting them right: `ratchet recall`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ratchet.errors import ConfigError
from ratchet.suggestions import did_you_mean
from ratchet.types import RunState
from reads.runs import RunHead, require_run
from store.faults import DECIDED, FAULTY, Fault
from store.names import Kind, require_named

_GRADERS = f"""
WITH {DECIDED} SELECT DISTINCT task.grader, grade.grader AS judge, grade.grader || '@' || grader_version AS version
FROM decided JOIN rollout ON rollout.id = decided.rollout_id JOIN task ON task.id = task_id
LEFT JOIN grade ON grade.id = decided.grade_id
"""
_EXTENT = f"""
WITH RECURSIVE {FAULTY},
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
    WHERE source_run_id = :run_id AND EXISTS (SELECT FROM faulty WHERE faulty.rollout_id = member.rollout_id
      AND faulty.grade_id IS NOT DISTINCT FROM member.grade_id) GROUP BY run_id
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
  (SELECT count(DISTINCT rollout_id) FROM patch JOIN rollout r ON r.id = rollout_id WHERE run_id = :run_id) AS of_run
FROM judged
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
    """The extent of a fault. The first numbers are of ended rollouts with a faulty verdict, in force or used by a step.

    `num_trained_groups`: those in plan rows with such a rollout, on which the advantages of all members rest, and
    `num_trained_tokens`: those of all members; `num_own_tokens`: those of such rollouts; `num_partly_touched`: groups
    that have other members, too. `clean_checkpoint`: the newest before the first step planned with them; `start_step`:
    the newest step up to it whose full weights are published; None: the run's first weights. `descendants`: runs that
    rest on weights of a touched step or on touched rollouts, and why. `num_steps_again`, `num_tokens_again`: planned
    after `start_step`. `commands`: grade again, in about `grading_seconds`, and start a run from there.
    """

    run_id: str
    since: datetime | None
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
    commands: list[str]


async def read_recall(
    connection: AsyncConnection,
    run: str,
    task: str | None = None,
    grader: str | None = None,
    rollouts: Sequence[str] = (),
    since: datetime | None = None,
) -> Recall:
    """Return what rests on the verdicts of a task, of a grader (`eval_cmd`, or one version: `eval_cmd@5`) or of some
    rollouts, by their names.

    `since`: only verdicts since then; in this machine's zone if it has none. Raises ConfigError for an unknown name.
    """
    if [bool(one) for one in (task, grader, rollouts)].count(True) != 1:
        raise ConfigError("name one of --task, --grader and --rollout")
    head = await require_run(connection, run)
    task = (await require_named(connection, task, Kind.TASK)).name if task else None
    if grader:
        await _require_grader(connection, head.run_id, grader)
    ids = [await _rollout_id(connection, head, one) for one in rollouts]
    fault = Fault(head.run_id, since and since.astimezone(), task, grader, tuple(ids))
    values = dict((await connection.execute(text(_EXTENT), asdict(fault))).one()._mapping)
    names, is_all = values.pop("to_grade"), values.pop("of_run") == values["num_patches"]
    commands = [f"ratchet tasks regrade {name} --adopt" for name in ([head.run_id] if names and is_all else names)]
    if values["num_steps"]:
        start = f"{head.run_id}@{values['start_step']}" if values["start_step"] else head.init_from
        again = [f"--from-store {head.source_run_id}"] if head.source_run_id else []
        again += [f"--set init_from={start}"] if start else []
        commands += [f"ratchet stop {head.run_id}"] if head.state in (RunState.RUNNING, RunState.PAUSED) else []
        commands.append(" ".join(["ratchet train CONFIG --new", *again]))
    values["evaluations"] = [TouchedEvaluation(**one) for one in values["evaluations"]]
    return Recall(run_id=head.run_id, since=fault.since, commands=commands, **values)


async def _require_grader(connection: AsyncConnection, run_id: str, grader: str) -> None:
    rows = await connection.execute(text(_GRADERS), {"run_id": run_id})
    known = {name for row in rows for name in row if name}
    if grader not in known:
        there = did_you_mean(grader, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"no rollout of run {run_id} is judged by a grader {grader!r}{there}")


async def _rollout_id(connection: AsyncConnection, head: RunHead, name: str) -> int:
    """Return the rollout's id. Raises ConfigError if it is not one on which the run rests."""
    named = await require_named(connection, name, Kind.ROLLOUT)
    if named.run_id != (run_id := head.source_run_id or head.run_id):
        raise ConfigError(f"{name!r} is a rollout of run {named.run_id}, not of {run_id}")
    return named.id
