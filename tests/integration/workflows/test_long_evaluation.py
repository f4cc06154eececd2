"""An evaluation of any size ends: its workflow continues as new before its history becomes too long.

The workflows and the server are real. The activities are those of a stand-in worker whose rollouts end at once.
Half of them get no verdict and no replacement, so they stay among the members that have no reward.
"""

from collections import Counter

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from ratchet.evaluation_payloads import EvaluateInput, EvaluateMembers, EvaluateResult, StartedMember
from ratchet.payloads import Claim, EvaluationPlan, MemberInput, Replacement, RolloutInput
from ratchet.temporal_settings import load_temporal_settings
from ratchet.types import Outcome
from tests.temporal_services import suggest_continue_as_new
from workflows.evaluate import Evaluate
from workflows.rollout import Rollout

NUM_MEMBERS = 40
SUGGEST_AFTER = 60


class Rollouts:
    """Counts the claims of each rollout. `page`: so many members are returned at once."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.claims: Counter[int] = Counter()
        self.graded: set[int] = set()
        self.begins = 0
        self.stages = load_temporal_settings().all_stages(1, 1)

    @activity.defn(name="begin_evaluation")
    async def begin(self, input: EvaluateInput) -> EvaluateMembers:
        self.begins += 1
        assert input.after is not None, "the workflow asks for pages"
        left = [one for one in range(input.after + 1, NUM_MEMBERS + 1) if one not in self.graded]
        members = [StartedMember(rollout_id=one, workflow_id=f"rollout/{one}", task="t") for one in left[: self.page]]
        return EvaluateMembers(members=members, harness="h", window=4, stages=self.stages, more=len(left) > self.page)

    @activity.defn(name="claim")
    async def claim(self, input: RolloutInput) -> Claim:
        assert input.rollout_id is not None
        self.claims[input.rollout_id] += 1
        is_graded = bool(input.rollout_id % 2)
        if is_graded:
            self.graded.add(input.rollout_id)
        return Claim(
            rollout_id=input.rollout_id,
            outcome=Outcome.GRADED if is_graded else Outcome.INFRA_FAILED,
            reward=1.0 if is_graded else None,
            attempt=1,
            patch_id=1,
            box_tries=1,
            grade_tries=1,
            stages=self.stages,
            summary="",
        )

    @activity.defn(name="replace_member")
    async def replace(self, input: MemberInput) -> Replacement:
        return Replacement()

    @activity.defn(name="end_evaluation")
    async def end(self, input: EvaluateInput) -> EvaluateResult:
        return EvaluateResult(label="l", num_rollouts=NUM_MEMBERS, num_graded=len(self.graded), solve_rate=1.0)


@pytest.mark.parametrize(("page", "suggest_after"), [(NUM_MEMBERS, SUGGEST_AFTER), (15, 4096)])
async def test_a_long_evaluation_continues_as_new_and_runs_each_rollout_once(
    client: Client, page: int, suggest_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because its history is long, or because there are more members than one execution gets."""
    suggest_continue_as_new(monkeypatch, suggest_after)
    rollouts = Rollouts(page)
    async with (
        Worker(
            client,
            task_queue="control",
            workflows=[Evaluate, Rollout],
            activities=[rollouts.begin, rollouts.claim, rollouts.replace, rollouts.end],
        ),
    ):
        plan = EvaluationPlan(label="l", step=0, temperature=0.0, num_samples=1)
        handle = await client.start_workflow(
            Evaluate.run, EvaluateInput(run_id="r", evaluation=plan), id="evaluate/r/l", task_queue="control"
        )
        result = await handle.result()
        last = await client.get_workflow_handle("evaluate/r/l").fetch_history()
    assert result.num_graded == NUM_MEMBERS // 2
    assert len(rollouts.claims) == NUM_MEMBERS and set(rollouts.claims.values()) == {1}
    assert rollouts.begins > 2, "it has continued as new"
    assert len(last.events) < max(2 * SUGGEST_AFTER, 10 * page)
