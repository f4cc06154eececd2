"""Stages `claim` and `finalise`: the transactions that give a rollout its owner and its outcome.

No other code does either (the sweep ends rollouts without a workflow), so a rollout counts exactly once.
"""

from typing import NamedTuple

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity

from activities.outcomes import RolloutChains, build_rollout_chains, compute_outcome
from activities.run_configs import RecordActivities
from activities.stage import activity_stage
from activities.temporal_ui_details import viewer_link
from ratchet import tracing
from ratchet.config import RunConfig
from ratchet.errors import BugError, ConfigError, FencedError
from ratchet.payloads import Claim, FinaliseInput, RolloutInput, RolloutResult
from ratchet.tracing import Fact, RolloutTrace
from ratchet.types import AgentExit, Outcome
from store import chains, grades, rollouts, tasks
from store.rollout_times import EndedRollout, read_ended_rollout
from store.rollouts import OutcomeValues, RolloutFacts
from store.schema import GradeTable, PatchTable

_LOG = structlog.get_logger()


class _GradedPatch(NamedTuple):
    grade: GradeTable
    patch: PatchTable


class RolloutRecordActivities(RecordActivities):
    @activity_stage("claim")
    async def claim(self, input: RolloutInput) -> Claim:
        """Make this workflow run the rollout's owner and return its limits; an ended rollout is returned unchanged."""
        info = activity.info()
        assert info.workflow_id is not None and info.workflow_run_id is not None
        if input.rollout_id is None:
            raise BugError("a rollout without a row is made by `prepare_rollout` first")
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            claimed = await rollouts.claim_rollout(connection, input.rollout_id, info.workflow_id, info.workflow_run_id)
            task = await tasks.task_label_of_rollout(connection, input.rollout_id)
        limits = config.limits
        return Claim(
            rollout_id=input.rollout_id,
            outcome=Outcome(claimed.outcome) if claimed.outcome else None,
            reward=claimed.reward,
            attempt=claimed.attempt,
            patch_id=None if config.harness.generate else claimed.patch_id,
            box_tries=self.settings.rollout.box_tries,
            grade_tries=self.settings.rollout.grade_tries,
            stages=self.settings.all_stages(limits.workspace_seconds, limits.eval_seconds),
            summary=f"{config.harness.generate or config.harness.name} on {task}"
            + viewer_link(f"/rollouts/{input.rollout_id}"),
            has_generate=config.harness.generate is not None,
        )

    @activity_stage("finalise")
    async def finalise(self, input: FinaliseInput) -> RolloutResult:
        """Give the rollout its outcome in one transaction; an ended rollout keeps the one it has.

        Closes the sessions, stores the chains of the attempt that was graded (without a grade: of the last attempt),
        sets outcome and reward, and applies the group's rule. Raises FencedError if another workflow run has it.
        """
        result = await self._finalise(input)
        await self._record_spans(input.rollout_id)
        return result

    async def _record_spans(self, rollout_id: int) -> None:
        """Export the spans of the rollout and its attempts; if the worker dies before, the next try does it."""
        trace = tracing.present_trace()
        if trace is None:
            return
        try:
            ended = await self.database.read(read_ended_rollout, rollout_id)
            if ended is not None:
                _record_spans(trace, rollout_id, ended)
        except Exception as error:  # a rollout that has its outcome must not fail for its telemetry
            _LOG.warning(
                "spans of a rollout not exported", rollout_id=rollout_id, reason=f"{type(error).__name__}: {error}"
            )

    async def _finalise(self, input: FinaliseInput) -> RolloutResult:
        config = await self.configs.of_rollout(input.rollout_id)
        async with self.database.begin() as connection:
            facts = await rollouts.lock_rollout(connection, input.rollout_id)
            if facts.outcome is not None:
                return _result(input.rollout_id, facts.outcome, facts.reward, facts.agent_exit)
            _require_ownership(input, facts)
            await rollouts.close_sessions(connection, input.rollout_id)
            graded = await _graded_patch(connection, input)
            # A workflow that continued from a stored patch has a later attempt than the one whose turns made the patch.
            attempt = graded.patch.attempt if graded else facts.attempt
            built = await build_rollout_chains(connection, input.rollout_id, attempt, config)
            await chains.replace_chains(connection, input.rollout_id, built.chains)
            agent_exit = await rollouts.agent_exit_of(connection, input.rollout_id, attempt)
            values: OutcomeValues = {
                **built.counts(),
                "agent_exit": agent_exit,
                "timings": {name: round(used, 3) for name, used in input.used_seconds.items()},
                **_outcome(input, config, graded, agent_exit, built),
            }
            if graded is not None and input.reason:
                values["outcome_reason"] = "; ".join(filter(None, (values["outcome_reason"], input.reason)))
            await rollouts.set_outcome(connection, input.rollout_id, values)
        return _result(input.rollout_id, values["outcome"], values.get("reward"), agent_exit)


def _record_spans(trace: RolloutTrace, rollout_id: int, ended: EndedRollout) -> None:
    ids: dict[str, Fact] = {"run_id": ended.run_id, "rollout_id": rollout_id, "workflow_id": ended.workflow_id}
    facts: dict[str, Fact] = {
        "task": ended.task,
        "harness": ended.harness,
        "policy_version": ended.policy_version,
        "outcome": ended.outcome,
        "reward": ended.reward,
        "num_turns": ended.num_turns,
        "num_trained_tokens": ended.num_trained_tokens,
        "claimed_at": None if ended.claimed_at is None else ended.claimed_at.isoformat(),
    }
    for one in ended.attempts:
        exit: dict[str, Fact] = {"attempt": one.number, "agent_exit": one.agent_exit}
        tracing.record_span(trace, one.number, "attempt", one.began_at, one.ended_at, ids | exit)
    tracing.record_span(trace, None, "rollout", ended.began_at, ended.ended_at, ids | facts)


def _require_ownership(input: FinaliseInput, facts: RolloutFacts) -> None:
    """Raise FencedError if another workflow has the rollout, or if an earlier run of its workflow wants to end it.

    A claim gives the rollout a higher attempt than all earlier ones. A run that was reset to a point behind its claim
    is not the owner, and has the same attempt; its verdict counts.
    """
    info = activity.info()
    is_owner = facts.owner == info.workflow_run_id
    if facts.workflow_id != info.workflow_id:
        raise FencedError(
            f"rollout {input.rollout_id} is that of {facts.workflow_id}, so {info.workflow_id} may not end it"
        )
    if input.attempt < facts.attempt or (input.grade_id is None and not is_owner):
        raise FencedError(
            f"rollout {input.rollout_id} is at attempt {facts.attempt} of workflow run {facts.owner}; "
            f"attempt {input.attempt} may not end it"
        )


def _result(rollout_id: int, outcome: str, reward: float | None, agent_exit: str | None) -> RolloutResult:
    return RolloutResult(
        rollout_id=rollout_id,
        outcome=Outcome(outcome),
        reward=reward,
        agent_exit=AgentExit(agent_exit) if agent_exit else None,
    )


async def _graded_patch(connection: AsyncConnection, input: FinaliseInput) -> _GradedPatch | None:
    if input.grade_id is None:
        return None
    grade = await grades.get_grade(connection, input.grade_id, input.rollout_id)
    return _GradedPatch(grade, await rollouts.get_patch(connection, grade.patch_id, input.rollout_id))


def _outcome(
    input: FinaliseInput, config: RunConfig, graded: _GradedPatch | None, agent_exit: str | None, built: RolloutChains
) -> OutcomeValues:
    """Return outcome and reward; without a verdict there is no reward."""
    if graded is None:
        assert input.failure is not None, "no verdict and no failure"
        return {"outcome": Outcome(input.failure), "outcome_reason": input.reason}
    try:
        return compute_outcome(config.grading.reward, graded.grade, graded.patch, agent_exit, built)
    except ConfigError as error:
        # The grade is kept: `ratchet tasks regrade --adopt` computes the reward once it is fixed.
        return {"outcome": Outcome.GRADER_FAILED, "outcome_reason": str(error)}
