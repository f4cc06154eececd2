"""Advice about huge pages is given only if small pages cost more than a fifth."""

from pathlib import Path

import pytest

from stack.huge_pages import HugePages, kernel_setting, probe_huge_pages

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
    ("pages", "environment", "words", "not_said"),
    [
        (HugePages("madvise", 1.9), WITH, ["1.9 times", "our parts use them", "echo always >"], ["GLIBC_TUNABLES"]),
        (HugePages("madvise", 8.0), REFUSED, ["8.0 times", "echo always >", "GLIBC_TUNABLES"], ["our parts use them"]),
        (HugePages("never", 1.0), WITH, ["never", "echo madvise >"], ["1.0", "our parts use them"]),
    ],
)
def test_the_advice_names_what_it_costs_and_what_helps(
    pages: HugePages, environment: dict[str, str], words: list[str], not_said: list[str]
) -> None:
    advice = pages.advice(environment)
    assert all(word in advice for word in words) and not any(word in advice for word in not_said)


@pytest.mark.parametrize("pages", [HugePages("madvise", 1.2), HugePages("always", 1.0), HugePages("", 1.0)])
def test_what_costs_little_is_not_named(pages: HugePages) -> None:
    assert pages.advice(WITH) == "" and pages.advice(REFUSED) == ""


def test_the_probe_of_this_machine() -> None:
    pages = probe_huge_pages()
    assert pages.setting == kernel_setting()
    assert pages.cost > 0 and (pages.cost == 1.0 or pages.setting == "madvise")
