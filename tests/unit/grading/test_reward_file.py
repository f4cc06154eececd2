"""Harbor's reward files: finite numbers are verdicts, all else is none and says which file and value."""

import pytest

from grading.base import Verdict, reward_number
from grading.reward_file import parse_reward
from grading.rewards import REWARD_FUNCTIONS, RewardFacts, compute_reward

TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


@pytest.mark.parametrize(
    ("content", "number"),
    [
        *((content, 1) for content in (b"1", b"1.0", b"1.00\n", b"1\r\n", b"\xef\xbb\xbf1\n", b" 1 ", b"1e0", b"+1")),
        *((content, 0) for content in (b"0", b"0.0", b"-0", b"0\r\n", b"0.00")),
        *((b"0.5", 0.5), (b"0.999999", 0.999999), (b"-1", -1), (b"2", 2), (b"1e-3", 0.001)),
    ],
)
def test_a_number_stays_what_it_is(content: bytes, number: float) -> None:
    assert parse_reward({TEXT: content}).values == {"reward": number}


@pytest.mark.parametrize("content", [b"", b"\r\n", b"nan", b"inf", b"true", b"1 0", b"1\n0", b"reward: 1", b"\xff"])
def test_no_number(content: bytes) -> None:
    found = parse_reward({TEXT: content})
    assert found.values is None and TEXT in found.text
    assert repr(content.decode(errors="replace").strip())[1:-1] in found.text


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b'{"reward": 1}', 1),
        (b'{"reward": 1.0, "style": 0.4}', 1),
        (b'{"style": 0, "reward": 1}', 1),
        (b'{"reward": 0.5}', 0.5),
        (b'{"accuracy": 0.25}', 0.25),
        (b'{"correct": 1, "style": 0.4}', 0.4),
        (b'{"correct": 1, "style": 1}', 1),
        (b'{"reward": true}', 1),
    ],
)
def test_one_or_several_keys(content: bytes, number: float) -> None:
    """Without the key `reward`, several keys are solved only if each of them is."""
    values = parse_reward({JSON: content}).values
    assert values is not None and reward_number(values) == number


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"{}",
            b'{"reward": "1"}',
            b'{"reward": null}',
            b'{"reward": 1, "style": "good"}',
            b"{",
            b'{"reward": 1e999}',
        ),
        *(b'{"reward": {"reward": 1}}', b'{"reward": [1]}', b'[{"reward": 1}]', b"1", b'"1"', b"null"),
        b'{"reward": NaN}',
    ],
)
def test_json_of_another_shape(content: bytes) -> None:
    found = parse_reward({JSON: content})
    assert found.values is None and JSON in found.text and "finite numbers" in found.text


def test_no_file_two_files_and_no_regular_file() -> None:
    assert "neither" in parse_reward({}).text and parse_reward({}).values is None
    assert parse_reward({TEXT: b"0", JSON: b'{"reward": 1}'}).values == {"reward": 1}
    assert parse_reward({TEXT: b"1", JSON: b"{"}).values is None
    assert "no regular file" in parse_reward({TEXT: None}).text
    assert "larger" in parse_reward({TEXT: b"1" + b" " * 70_000}).text


FACTS = RewardFacts(None, 1, 1, 1, 1)


@pytest.mark.parametrize("name", REWARD_FUNCTIONS)
def test_the_reward_is_the_number_unless_it_was_refuted(name: str) -> None:
    def reward(solved: bool, rewards: dict[str, float], rejected: bool = False) -> float:
        verdict = Verdict(solved, "", "", 0.0, rejected=rejected, rewards=rewards)
        return compute_reward(name, verdict, FACTS).value

    assert reward(False, {"reward": 0.5, "style": 0.1}) == 0.5
    assert reward(True, {"reward": 1.0}) == 1
    assert reward(False, {"reward": 1.0}) == 0  # a test failed, or a control run passed
    assert reward(False, {"reward": 0.5}, rejected=True) == 0
    assert reward(False, {"a": 0.5, "b": -1.0}) == -1


def test_the_numbers_are_components() -> None:
    verdict = Verdict(False, "", "", 0.0, rewards={"correct": 1.0, "style": 0.25})
    assert compute_reward("solved", verdict, FACTS).components == {"correct": 1.0, "style": 0.25, "solved": 0.0}
