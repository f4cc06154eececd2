"""Arguments and results of the Evaluate workflow and its activities; the rules of `payloads.py` apply."""

from ratchet.payloads import EvaluationPlan, Payload, StageOptions


class EvaluateInput(Payload):
    """Argument of the Evaluate workflow; the policy version must not change before it ends.

    `after`: the rollouts up to this id have had their turn. `share`: of the run's open rollouts, beside others.
    """

    run_id: str
    evaluation: EvaluationPlan
    after: int = 0
    share: float = 1.0


class StartedMember(Payload):
    """A rollout of an evaluation. `task`: its label."""

    rollout_id: int
    workflow_id: str
    task: str


class EvaluateMembers(Payload):
    """Rollouts of an evaluation that have no reward yet, in the order of their ids; at most `window` run at once.

    `more`: there are others with higher ids, which the next execution of the workflow gets.
    """

    members: list[StartedMember]
    harness: str
    window: int
    stages: dict[str, StageOptions]
    more: bool = False


class EvaluateResult(Payload):
    """Result of an evaluation. `solve_rate` None: no rollout has a verdict."""

    label: str
    num_rollouts: int
    num_graded: int
    solve_rate: float | None
