"""Tokens are put together if both their ids and their commands are equal."""

from reads.step_facts import RatioToken, group_ratio_tokens
from reads.steps import StepToken


def token(token_id: int, position: int, command: str) -> RatioToken:
    stored = StepToken(1, 2, position, token_id, -1.0, -2.0, 0.5, False)
    return RatioToken(stored, 0.37, f"t{token_id}", 0.5, command)


def test_equal_tokens_of_equal_commands_are_one_group() -> None:
    found = group_ratio_tokens([token(7, 0, "ls"), token(8, 1, "ls"), token(7, 2, "ls"), token(7, 3, "cat")])
    assert [(one.token_id, one.command, [each.token.position for each in one.tokens]) for one in found] == [
        (7, "ls", [0, 2]),
        (8, "ls", [1]),
        (7, "cat", [3]),
    ]
