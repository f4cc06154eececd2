"""The edited assertion is the one at which the task's tests fail without a solution."""

import pytest

from grading.broken_oracles import apply_edits, named_lines, propose

SEVERAL = (
    b"def test_it():\n"  # 1
    b"    assert f(1) == 1\n"
    b"    assert f(2) == 22\n"  # 3
    b"    assert f(3) == 333\n"
    b"    assert f(4) < 4444\n"
    b"\n\n"
    b"def test_other():\n"
    b"    g(5)\n"  # 9
    b"    assert f(6) == 6\n"
)
NAMES = ["t.py::test_it", "t.py::test_other"]
LOGS = {
    "tests/t.py:3: AssertionError": (b"f(2) == 22", b"f(6) == 6"),
    "tests/t.py:5: in test_it": (b"f(4) < 4444", b"f(6) == 6"),
    '  File "/work/tests/t.py", line 4, in test_it': (b"f(3) == 333", b"f(6) == 6"),
    "at main (t.py:4) and t.py:9: AttributeError": (b"f(3) == 333", b"f(6) == 6"),
}


def lines_of(changed: bytes) -> set[bytes]:
    """Return the lines of the original that are no more there."""
    return {line.strip().removeprefix(b"assert ") for line in set(SEVERAL.split(b"\n")) - set(changed.split(b"\n"))}


@pytest.mark.parametrize("log", LOGS)
def test_each_test_is_changed_where_it_fails(log: str) -> None:
    for number in range(6):
        broken = propose({"tests/t.py": SEVERAL}, NAMES, number, False, failed_at=named_lines(log))
        assert broken is not None
        assert lines_of(apply_edits(broken, "tests/t.py", SEVERAL)) == set(LOGS[log]), number


def test_what_follows_an_error_is_changed_and_not_what_precedes_it() -> None:
    source = b"def test_it():\n    assert f(1) == 1\n    g(5)\n    assert f(2) == 2\n    assert f(3) == 3\n"
    for number in range(6):
        broken = propose({"t.py": source}, ["t.py::test_it"], number, False, failed_at=["t.py:3"])
        assert broken is not None and b"f(1) == 1\n" in apply_edits(broken, "t.py", source)


def test_one_of_many_tests_without_names_is_changed_where_the_command_fails() -> None:
    source = b"int main(void) {\n  CHECK_EQ(f(1), 1);\n  CHECK_EQ(f(2), 2);\n  CHECK_EQ(f(3), 3);\n}\n"
    found = [propose({"test.c": source}, [], number, True, failed_at=["test.c:3"]) for number in range(4)]
    changed = [apply_edits(one, "test.c", source) for one in found if one is not None]
    assert len(changed) == 4
    assert all(b"f(2), 2" not in text for text in changed[:2]), "first where it fails"
    assert all(b"f(3), 3" not in text for text in changed[2:]), "then what that failure hides"


def test_other_tries_change_something_else() -> None:
    found = {
        apply_edits(broken, "t.py", SEVERAL)
        for number in (0, 8, 10)
        if (broken := propose({"t.py": SEVERAL}, NAMES[:1], number, False, failed_at=["t.py:3"])) is not None
    }
    assert len(found) == 3


def test_names_of_lines_are_found_in_linear_time() -> None:
    assert named_lines("a" * 300_000 + ".py:1") == [] and len(named_lines("t.py:1 " * 10_000)) == 1
    assert named_lines("(file:///w/test/price.test.js:10:10) PriceTest.java:7)") == [
        "price.test.js:10",
        "PriceTest.java:7",
    ]
