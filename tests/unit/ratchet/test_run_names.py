import pytest

from ratchet.run_names import rollout_number, step_number


@pytest.mark.parametrize(
    ("text", "step"),
    [("0", 0), ("2147483647", 2**31 - 1), ("2147483648", None), ("9" * 18, None), ("9" * 5000, None), ("x", None)],
)
def test_a_step_that_no_column_holds_is_none(text: str, step: int | None) -> None:
    assert step_number(text) == step


@pytest.mark.parametrize(("name", "number"), [("12", 12), ("9" * 19, None), ("²", None), ("rollout/r/0/0", None)])
def test_a_number_that_no_rollout_can_have_is_a_name(name: str, number: int | None) -> None:
    assert rollout_number(name) == number
