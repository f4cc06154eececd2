"""A patch as files and lines."""

from viewer.models import diffs
from viewer.models.diffs import read_patch

TWO_FILES = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1 +1 @@
-old
+new
diff --git a/b c.py b/b c.py
new file mode 100644
"""


def test_files_and_kinds_of_lines() -> None:
    patch = read_patch(TWO_FILES)
    assert [file.path for file in patch.files] == ["a.py", "b c.py"]
    assert [line.kind for line in patch.files[0].lines] == ["head", "head", "hunk", "removed", "added"]
    assert patch.num_left_out == 0


def test_a_huge_patch_is_cut_and_says_so() -> None:
    patch = read_patch("diff --git a/a b/a\n" + "+x\n" * 10_000)
    assert sum(len(file.lines) for file in patch.files) == diffs.MAX_LINES - 1
    assert patch.num_left_out == 10_001 - diffs.MAX_LINES


def test_no_text_is_no_file() -> None:
    assert read_patch("").files == []
