"""Any bytes are split and joined again; paths are bytes in truth."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.diff_sections import join_diff, printable_path, split_diff


def section(header: bytes) -> bytes:
    return b"diff --git " + header + b"\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+x\n"


@pytest.mark.parametrize(
    ("header", "path"),
    [
        (b"a/x y b/x y", b"x y"),
        (b'"a/d\\377/x" "b/d\\377/x"', b"d\xff/x"),
        (b'"a/tab\\tline\\n" "b/tab\\tline\\n"', b"tab\tline\n"),
        (b'"a/q\\"\\\\" "b/q\\"\\\\"', b'q"\\'),
        (b"a/-rf b/-rf", b"-rf"),
        (b'"a/unterminated\\', b"unterminated"),
        (b'"a/odd\\q\\9\\777', b"odd" + b"q9\xff"),
        (b'"', b""),
        (b"", b""),
    ],
)
def test_paths(header: bytes, path: bytes) -> None:
    (change,) = split_diff(section(header))
    assert os.fsencode(change.path) == path


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_nothing_raises_and_all_is_kept(parts: list[bytes]) -> None:
    diff = b"diff --git " + b"\ndiff --git ".join(parts)
    assert join_diff(split_diff(diff)) == diff
    for change in split_diff(diff):
        printable = printable_path(change.path)
        assert "\0" not in printable and printable.encode().decode() == printable


def test_a_rename_has_its_new_path() -> None:
    (change,) = split_diff(b"diff --git a/one.py b/a longer name.py\nrename from one.py\nrename to a longer name.py\n")
    assert change.path == "a longer name.py"
