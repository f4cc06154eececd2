"""Advice about huge pages is given only to processes that get small pages."""

from pathlib import Path

import pytest

from stack.huge_pages import advice, kernel_setting

WITH = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
REFUSED = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("always madvise [never]\n", "never"),
        ("always inherit [later] never\n", "later"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_setting_is_the_word_in_brackets(text: str | None, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    assert kernel_setting(path) == expected


@pytest.mark.parametrize(
    ("setting", "environment", "words"),
    [
        ("madvise", REFUSED, ["madvise", "GLIBC_TUNABLES", "echo always >"]),
        ("never", WITH, ["never", "echo madvise >"]),
        ("never", REFUSED, ["never", "echo madvise >"]),
    ],
)
def test_the_advice_names_what_helps(setting: str, environment: dict[str, str], words: list[str]) -> None:
    assert all(word in advice(setting, environment) for word in words)


@pytest.mark.parametrize(
    ("setting", "environment"), [("madvise", WITH), ("always", WITH), ("always", REFUSED), ("", REFUSED)]
)
def test_processes_with_huge_pages_need_none(setting: str, environment: dict[str, str]) -> None:
    assert advice(setting, environment) == ""
