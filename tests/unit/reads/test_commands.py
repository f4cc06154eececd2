"""Commands of shell scripts are counted by program, once a rollout, apart for solved and unsolved rollouts."""

from typing import Any

import pytest

from reads.commands import JudgedRollout, PackedAnswer, commands_of, count_commands, first_words
from store.arrays import pack_json


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("cat calc.py", ["cat"]),
        ("cd /w && git diff | head -5", ["git diff", "head"]),
        ("PYTHONPATH=. /usr/bin/python -m pytest -q; echo 'a; b && c'", ["python -m pytest", "echo"]),
        ("cat > a.py <<'EOF'\nimport os; rm = 1\nEOF\npip install -e .", ["cat", "pip install"]),
        ("for f in *.py\ndo sed -i s/a/b/ $f\ndone", ["for", "sed"]),
        ("# a comment\n\n", []),
        ("sed -i s'a\n' b.py; 'cat\n\"", ["sed"]),
    ],
)
def test_first_words(script: str, expected: list[str]) -> None:
    assert first_words(script) == expected


def answer(rollout_id: int, *commands: str) -> PackedAnswer:
    calls = [{"function": {"name": "bash", "arguments": {"command": one}}} for one in commands]
    return PackedAnswer(rollout_id, pack_json({"message": {"role": "assistant", "content": "", "tool_calls": calls}}))


def test_what_unsolved_rollouts_have_more_often_comes_first_and_a_rollout_counts_once() -> None:
    rollouts = [JudgedRollout(1, False, 9), JudgedRollout(2, False, 9), JudgedRollout(3, True, 9)]
    answers = [
        answer(1, "cat a", "cat b"),
        answer(2, "cat a"),
        answer(2, "ls"),
        answer(3, "cat a"),
        answer(3, "git st"),
    ]
    found = [(one.command, one.num_unsolved, one.num_solved, one.num_uses) for one in count_commands(rollouts, answers)]
    assert found == [("ls", 1, 0, 1), ("cat", 2, 1, 4), ("git st", 0, 1, 1)], "both unsolved and all solved ones cat"
    assert [one.newest_unsolved for one in count_commands(rollouts, answers)] == [2, 2, None]
    assert [one.difference for one in count_commands(rollouts, answers)] == [0.5, 0.0, -1.0]
    by_line = [(one.command, one.num_unsolved) for one in count_commands(rollouts, answers, by_line=True)]
    assert by_line == [("cat b", 1), ("ls", 1), ("cat a", 2), ("git st", 0)]


@pytest.mark.parametrize(
    "stored",
    [[], "x", {"message": []}, {"message": {"tool_calls": ["x"]}}, {"message": {"tool_calls": 1}},
     {"message": {"tool_calls": [{"function": "x"}]}}],
)  # fmt: skip
def test_a_damaged_answer_has_no_command(stored: Any) -> None:
    assert commands_of(pack_json(stored), by_line=True) == commands_of(b"no zstd", by_line=True) == []
