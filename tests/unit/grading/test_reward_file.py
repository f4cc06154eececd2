"""Harbor's reward files: 0 and 1 are verdicts, everything else is none and says which file and value."""

import pytest

from grading.reward_file import parse_reward

TEXT, JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


@pytest.mark.parametrize("content", [b"1", b"1.0", b"1.00\n", b"1\r\n", b"\xef\xbb\xbf1\n", b" 1 ", b"1e0", b"+1"])
def test_one(content: bytes) -> None:
    assert parse_reward({TEXT: content}).value == 1


@pytest.mark.parametrize("content", [b"0", b"0.0", b"-0", b"0\r\n", b"0.00"])
def test_zero(content: bytes) -> None:
    assert parse_reward({TEXT: content}).value == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"\r\n", b"0.5", b"0.999999", b"-1", b"2", b"nan", b"inf", b"true", b"1 0", b"1\n0", b"reward: 1", b"\xff"],
)
def test_no_number_of_two(content: bytes) -> None:
    found = parse_reward({TEXT: content})
    assert (
        found.value is None
        and TEXT in found.text
        and repr(content.decode(errors="replace").strip())[1:-1] in (found.text)
    )


@pytest.mark.parametrize("content", [b'{"reward": 1}', b'{"reward": 1.0, "style": 0.4}', b'{"style": 0, "reward": 1}'])
def test_one_in_json(content: bytes) -> None:
    assert parse_reward({JSON: content}).value == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"{}", b'{"accuracy": 1}', b'{"reward": "1"}', b'{"reward": true}', b'{"reward": null}', b'{"reward": 0.5}'),
        *(
            b'{"reward": {"reward": 1}}',
            b'{"reward": [1]}',
            b'[{"reward": 1}]',
            b"1",
            b'"1"',
            b"null",
            b'{"reward": NaN}',
        ),
    ],
)
def test_json_of_another_shape(content: bytes) -> None:
    found = parse_reward({JSON: content})
    assert found.value is None and JSON in found.text and '"reward"' in found.text


def test_no_file_two_files_and_no_regular_file() -> None:
    assert "neither" in parse_reward({}).text and parse_reward({}).value is None
    assert parse_reward({TEXT: b"1", JSON: b'{"reward": 1}'}).value == 1
    assert "differ" in parse_reward({TEXT: b"1", JSON: b'{"reward": 0}'}).text
    assert parse_reward({TEXT: b"1", JSON: b"{"}).value is None
    assert "no regular file" in parse_reward({TEXT: None}).text
    assert "larger" in parse_reward({TEXT: b"1" + b" " * 70_000}).text
