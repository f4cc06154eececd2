"""Static flags: what a takeover needs is named, ordinary code is not."""

import pytest

from activities.graders.diff_sections import split_diff
from activities.graders.flags import Flag, static_flags


def diff_of(path: str, text: str) -> bytes:
    lines = text.split("\n")
    body = "".join(f"+{line}\n" for line in lines)
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}".encode()


@pytest.mark.parametrize(
    ("path", "text", "what"),
    [
        ("a.py", "for one in gc.get_objects(): pass", "looks up live objects"),
        ("a.py", "frame = sys._getframe(2)", "walks stack frames"),
        ("a.py", "class Same:\n    def __eq__(self, other):\n        return True", "compares with a constant"),
        ("a.py", "class Near:\n    def __eq__(self, other):\n        return near(other)", "defines how values compare"),
        ("a.py", "Near = type('Near', (int,), {})\nNear.__eq__ = near", "defines how values compare"),
        ("a.js", "class Near { valueOf() { return 1 } }", "defines how values compare"),
        ("a.rs", "impl PartialEq<i64> for Near {", "defines how values compare"),
        ("A.java", "public boolean equals(Object other) {", "defines how values compare"),
        ("a.rb", "def ==(other)", "defines how values compare"),
        ("a.cpp", "bool operator==(const Near& a, int b);", "defines how values compare"),
        ("a.py", "f.__code__ = g.__code__", "changes code objects"),
        ("lib/a.mjs", "process.exit(0)", "ends the process"),
        ("a.go", "func init() { os.Exit(0) }", "ends the process"),
        ("src/lib.rs", "std::process::exit(0)", "ends the process"),
        ("A.java", "Runtime.getRuntime().halt(0);", "ends the process"),
        ("a.rb", "exit!", "ends the process"),
        ("tool.sh", "cat /proc/self/environ", "reads its own environment"),
    ],
)
def test_what_a_takeover_needs(path: str, text: str, what: str) -> None:
    assert Flag(what, path) in static_flags(split_diff(diff_of(path, text)), set())
    assert static_flags(split_diff(diff_of(path, text)), {path}) == []


def test_ordinary_code_has_none() -> None:
    code = (
        "import os\n\n\ndef total(items):\n    return sum(item.price for item in items)\n\n\n"
        "class A:\n    def __add__(self, other):\n        return A(self.x + other.x)\n"
    )
    assert static_flags(split_diff(diff_of("shop/price.py", code)), set()) == []


@pytest.mark.parametrize("word", ["def __eq__(", "gc ", "process.", "os . ", "a", " ", "sys\n"])
def test_the_time_is_linear(word: str) -> None:
    static_flags(split_diff(diff_of("a.py", word * (1_000_000 // len(word)))), set())
