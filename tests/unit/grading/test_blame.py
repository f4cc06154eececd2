"""A log that names a file of the patch shows whose deed it is."""

import pytest

from grading.blame import names_change
from grading.diff_sections import split_diff


def _diff(path: str, *header: str) -> bytes:
    lines = [f"diff --git a/{path} b/{path}", *header, f"--- a/{path}", f"+++ b/{path}", "@@ -1 +1 @@", "-x", "+y", ""]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("path", "log"),
    [
        ("price.go", "./price.go:3:1: syntax error"),
        ("src/shop/Price.java", "src/shop/Price.java:3: error: ';' expected"),
        ("shop/price.py", '  File "/w/shop/price.py", line 3\n    def f(:\nSyntaxError: invalid syntax'),
        ("src/lib.rs", " --> src/lib.rs:3:1"),
        ("src/a.ts", "src/a.ts(3,5): error TS1005"),
        ("price.js", "file:///w/price.js:3"),
        ("lib/price.rb", "/w/lib/price.rb:3:in `f'"),
        ("src/Price.php", "PHP Parse error: syntax error in /w/src/Price.php on line 3"),
        ("c/price.c", "price.c:3:1: error: expected ';'"),
        ("price/pyproject.toml", "ERROR: /w/price/pyproject.toml: Expected ']' (at line 1, column 25)"),
    ],
)
def test_a_log_names_a_changed_file(path: str, log: str) -> None:
    changes = split_diff(_diff(path))
    assert names_change(f"building\n{log}\n", changes)
    assert not names_change(f"building\n{log}\n".replace("rice", "ound").replace("a.ts", "b.ts"), changes) or (
        path == "src/lib.rs"
    )


@pytest.mark.parametrize(
    "log", ["uvx: command not found", "configfile: setup.cfg", "/lib/other/__init__.py:3: in load", "xsetup.cfg:3:"]
)
def test_a_log_that_names_no_place_of_the_patch(log: str) -> None:
    changes = split_diff(_diff("setup.cfg") + _diff("shop/__init__.py"))
    assert not names_change(log, changes)


def test_a_removed_file_needs_no_line() -> None:
    removed = _diff("run-tests.sh", "deleted file mode 100755")
    assert names_change("sh: 0: cannot open run-tests.sh: No such file", split_diff(removed))
    assert not names_change("sh: 0: cannot open run-tests.sh: No such file", split_diff(_diff("run-tests.sh")))
