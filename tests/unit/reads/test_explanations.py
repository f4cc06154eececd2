"""The story of a run and of a step says what is stored, and nothing of what is not."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ratchet.token_statistics import TrainedToken
from reads.explanations import explain_run, explain_step
from reads.run_facts import RunFacts
from reads.runs import FailureCount, OutcomeCount, RunHead
from reads.step_rows import StepHead
from reads.steps import StepFacts
from reads.turns import TurnContent

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def run_facts(**changed: Any) -> RunFacts:
    head = RunHead(
        "quick-1",
        "quick",
        "paused",
        "the disk is full",
        "none",
        {},
        0,
        "/m",
        None,
        None,
        "default",
        1,
        7,
        5,
        0,
        None,
        NOW,
        None,
    )
    return RunFacts(**({"run": head, "num_steps": 10, "first": {}, "last": {}} | changed))


def test_a_run_without_steps_has_no_figures() -> None:
    assert explain_run(run_facts()) == [
        "quick-1 is paused at step 7 of 10: the disk is full.",
        "It has no rollouts yet.",
    ]


def test_rollouts_by_hand_are_no_run_that_trains() -> None:
    facts = run_facts()
    by_hand = replace(facts.run, config_name="adhoc", state="running", state_reason="")
    assert explain_run(replace(facts, run=by_hand))[0] == "quick-1 holds rollouts by hand; it trains nothing."


def test_a_run_says_how_it_learns_and_how_rollouts_ended() -> None:
    said = explain_run(
        run_facts(
            first={1: {"reward_mean": 0.25}, 2: {"reward_mean": 0.35}},
            last={7: {"reward_mean": 0.5, "groups_with_signal_fraction": 0.4, "alarm_masked": 1.0}},
            outcomes=[OutcomeCount("train", "graded", "done", 30), OutcomeCount("eval", "graded", "done", 10)],
            failures=[FailureCount("infra_failed", "the box died", 2, 99)],
        )
    )
    assert "from 0.300 in steps 1 to 2 to 0.500 in step 7" in said[1] and "40% of the groups" in said[2]
    assert said[3] == "Its 40 rollouts: 40 graded."
    assert said[4] == "2 ended as infra_failed: the box died (newest: rollout 99)."
    assert said[5] == "Alarm masked in step 7."


def test_a_step_names_the_tokens_behind_a_spike() -> None:
    head = StepHead(3, "stepped", {}, [], 1, NOW, NOW, None)
    token = TrainedToken(12, 34, 56, 78, -4.0, -0.5, 1.0, False)
    call = {"function": {"name": "bash", "arguments": {"command": "rm -rf build"}}}
    turn = TurnContent(
        *(34, 1, "", "main", "completed", None, 5, 5, None, None, NOW, NOW, None, "", 0, []),
        answer={"role": "assistant", "tool_calls": [call]},
    )
    said = explain_step(StepFacts(head, {"loss": 0.5}, tokens=[token], turns={34: turn}))
    assert said[1] == "loss 0.5."
    assert said[2] == (
        "Token 78 at position 56 of rollout 12, turn 34 in `rm -rf build`: recorded logprob -4.000, learner's -0.500."
    )
    assert explain_step(StepFacts(head, {}))[-1] == "The learner has not trained it yet."
