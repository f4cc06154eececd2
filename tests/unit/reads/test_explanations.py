"""The story of a step says what is stored, and nothing of what is not."""

from datetime import UTC, datetime

from ratchet.token_statistics import TrainedToken
from reads.explanations import explain_step
from reads.step_rows import StepHead
from reads.steps import StepFacts
from reads.turns import TurnContent

NOW = datetime(2026, 11, 1, tzinfo=UTC)


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
