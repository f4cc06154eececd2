"""Outcomes of tests that a runner without a witness prints."""

from grading.log_parsers import find_log_parser

_DJANGO = """test_a (m.C) ... WARNING: a deprecated call
ok
test_b (m.C)
It has a docstring. ... ok
test_c (m.C) ... one line
another line
FAIL
test_d (m.C) ... skipped 'no network'
test_e (m.C) ... started and never ended
test_f (m.C) ... ok
ok
"""


def test_what_a_test_prints_stands_before_its_outcome() -> None:
    found = find_log_parser("django")(_DJANGO)
    assert found == {
        "test_a (m.C)": "passed",
        "It has a docstring.": "passed",
        "test_c (m.C)": "failed",
        "test_d (m.C)": "skipped",
        "test_f (m.C)": "passed",
    }
