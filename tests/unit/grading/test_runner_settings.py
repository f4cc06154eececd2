"""The runner's part is put back, the rest is kept, and no text takes long or raises."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.runner_settings import MAX_SETTINGS_BYTES, restore_runner_settings

MAKE = "PY = pytest\nSRCS = a.c b.c\n\nbuild:\n\tcc $(SRCS)\n\ntest: prepare\n\t$(PY) tests\n\nprepare:\n\ttrue\n"
PACKAGE = json.dumps({"scripts": {"test": "npm run unit", "unit": "jest", "build": "tsc"}, "jest": {"verbose": True}})

KEPT = [
    ("makefile", MAKE, MAKE.replace("b.c", "b.c c.c")),
    ("makefile", MAKE, MAKE + "\n.PHONY: docs\ndocs:\n\tmkdocs\n"),
    ("makefile", MAKE, MAKE.replace("cc $(SRCS)", "cc -O2 $(SRCS)")),
    ("package_json", PACKAGE, PACKAGE.replace('"tsc"', '"tsc -b"')),
]
NOT_KEPT = [
    ("makefile", MAKE, MAKE.replace("PY = pytest", "PY = true")),
    ("makefile", MAKE, MAKE.replace("test: prepare", "test: # a.c prepare")),
    ("makefile", MAKE, MAKE.replace("test: prepare", 'test: "x.c prepare')),
    ("makefile", MAKE, MAKE.replace("$(PY) tests", "evil.c tests")),
    ("makefile", "test: a.c\n\t./run\n", "test: a.c b.c \\\n\t./run\n"),
    ("makefile", MAKE, MAKE.replace("prepare:\n\ttrue", "prepare:\n\trm -r tests")),
    ("makefile", MAKE, MAKE + "test: PY = true\n"),
    ("makefile", MAKE, MAKE + "include x.mk\n"),
    ("makefile", MAKE, MAKE + "%: PY = true\n"),
    ("makefile", MAKE, MAKE + "N = PY\n$(N) := true\n"),
    ("makefile", MAKE, MAKE.replace("test: prepare", "ifeq (0,1)\ntest: prepare") + "endif\n"),
    ("makefile", MAKE, "SHELL := /bin/true\n" + MAKE),
    ("package_json", PACKAGE, PACKAGE.replace('"unit": "jest"', '"unit": "true"')),
    ("package_json", PACKAGE, PACKAGE.replace("true", "false")),
    ("package_json", PACKAGE, PACKAGE.replace('"build"', '"pretest": "exit 0", "build"')),
]


@pytest.mark.parametrize(("kind", "base", "patched"), KEPT)
def test_an_honest_change_is_kept(kind: str, base: str, patched: str) -> None:
    assert restore_runner_settings(kind, base.encode(), patched.encode()) == patched.encode()


@pytest.mark.parametrize(("kind", "base", "patched"), NOT_KEPT)
def test_a_change_of_the_runners_part_is_not(kind: str, base: str, patched: str) -> None:
    found = restore_runner_settings(kind, base.encode(), patched.encode())
    assert found != patched.encode()
    if found is not None:  # put back: a second look finds nothing to do
        assert restore_runner_settings(kind, base.encode(), found) == found


def test_a_new_makefile_beside_the_one_that_make_finds_is_removed() -> None:
    assert restore_runner_settings("makefile", None, b"all:\n\techo\n") is None


KINDS = ["makefile", "package_json"]
FULL = MAX_SETTINGS_BYTES - 100
HOSTILE = {
    "a word": "test " * (FULL // 5),
    "one long word": "a" * FULL,
    "a megabyte": "test " * 200_000,
    "brackets": "[" * 100_000,
    "nested tables": "a = " + "{a=" * 40_000,
    "nested objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "dots": "a." * (FULL // 2) + "a = 1\n",
    "lines of dots": ("a." * 990 + "a = 1\n") * 60,
    "tables of dots": ("[" + "a." * 900 + "b]\n") * 60,
    "blanks": "\n" * FULL,
    "spaces": "x" + " " * FULL + "x\n",
    "lines of spaces": ("x" + " " * 1_900 + "y\n") * 60,
    "colons": "a" + ":" * FULL,
    "one variable": "a=$(a)\n" * (FULL // 8) + "test: a\n\t$(a)\n",
    "targets": "test " * 300 + ":\n\tx\n" + "a:test\n" * 10_000,
    "headers": "[a]\n" * (FULL // 4),
    "digits": "a = " + "1" * 60_000,
    "backslashes": "\\\n" * (FULL // 2),
    "references": "$(" * (FULL // 2),
    "nul": "\0" * 1000,
    "not utf-8": "\udcff\udcfe",
    "surrogates": '{"scripts": {"test": "\\ud800"}, "x": "\\ud800"}',
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_text_neither_raises_nor_takes_long(kind: str, hostile: str) -> None:
    patched = HOSTILE[hostile].encode("utf-8", "surrogateescape")
    started = time.process_time()
    restore_runner_settings(kind, b"x = 1\n", patched)
    restore_runner_settings(kind, None, patched)
    # A bound of the screen, not a measurement: quadratic readers need minutes.
    assert time.process_time() - started < 20


@given(st.sampled_from(KINDS), st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes(kind: str, base: bytes, patched: bytes) -> None:
    restore_runner_settings(kind, base, patched)
    restore_runner_settings(kind, None, patched)
