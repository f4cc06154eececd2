"""Answers of the workflows' queries, for people; the rules of `payloads.py` apply."""

from ratchet.payloads import Payload


class RunStatus(Payload):
    """Answer of TrainRun's query `state`. `waits_for` and `waits_since`: what the workflow itself waits for now.

    `batch_reward_mean`: mean reward of the newest step's batch.
    """

    run_id: str
    state: str = ""
    reason: str = ""
    wish: str = ""
    step: int = 0
    last_step: int | None = None
    num_open_groups: int = 0
    batch_reward_mean: float | None = None
    situation: str = ""
    waits_for: str = ""
    waits_since: str = ""


class RolloutStatus(Payload):
    """Answer of Rollout's query `state`: the present stage and since when, and what the earlier ones have given."""

    attempt: int
    stage: str
    stage_since: str
    box: str = ""
    agent: str = ""
    patch: str = ""
    verdict: str = ""
