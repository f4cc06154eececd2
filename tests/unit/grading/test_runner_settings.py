"""The runner's part is put back, the rest is kept, and no text takes long or raises."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.runner_settings import MAX_SETTINGS_BYTES, restore_runner_settings

CARGO = '[package]\nname = "a"\n\n[dependencies]\nserde = "1"\n\n[dev-dependencies]\nproptest = "1"\n'
CMAKE = "add_library(shop\n  price.c\n  total.c\n)\nadd_test(NAME price COMMAND price_test)\n"
MAKE = "PY = pytest\nSRCS = a.c b.c\n\nbuild:\n\tcc $(SRCS)\n\ntest: prepare\n\t$(PY) tests\n\nprepare:\n\ttrue\n"
MOD = "module x\n\ngo 1.21\n\nrequire (\n\ta v1 // indirect\n)\n"
PACKAGE = json.dumps({"scripts": {"test": "npm run unit", "unit": "jest", "build": "tsc"}, "jest": {"verbose": True}})
SOURCES = {"CMakeLists.txt": "sources", "Makefile": "makefile", "go.mod": "go_mod", "Cargo.toml": "cargo"}

KEPT = [
    ("cargo", "Cargo.toml", CARGO, CARGO.replace('serde = "1"', 'serde = "1"\nrand = "2"')),
    ("cargo", "Cargo.toml", CARGO, CARGO + '\n[[bin]]\nname = "b"\npath = "b.rs"\n'),
    ("cargo", "Cargo.toml", CARGO, CARGO + 'insta = "1"\n'),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("  price.c\n", "  money.c\n  price.c\n")),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("total.c\n", "total.c\n  ${X}/y.c\n".replace("${X}", "sub"))),
    ("sources", "meson.build", "library('s', 'a.c')\n", "library('s', 'a.c', 'b.c')\n"),
    ("sources", "BUILD.bazel", 'srcs = ["a.cc"],\n', 'srcs = ["a.cc", "b.cc"],\n'),
    ("sources", "Makefile.am", "S = a.c \\\n  b.c\n", "S = a.c \\\n  b.c \\\n  c.c\n"),
    ("makefile", "Makefile", MAKE, MAKE.replace("b.c", "b.c c.c")),
    ("makefile", "Makefile", MAKE, MAKE + "\n.PHONY: docs\ndocs:\n\tmkdocs\n"),
    ("makefile", "Makefile", MAKE, MAKE.replace("cc $(SRCS)", "cc -O2 $(SRCS)")),
    ("go_mod", "go.mod", MOD, MOD.replace("\ta v1", "\ta v1\n\tb v2")),
    ("package_json", "package.json", PACKAGE, PACKAGE.replace('"tsc"', '"tsc -b"')),
    ("composer_json", "composer.json", '{"require": {}}', '{"require": {"a/b": "1"}}'),
]
NOT_KEPT = [
    ("cargo", "Cargo.toml", CARGO, CARGO.replace('name = "a"', 'name = "a"\nautotests = false')),
    ("cargo", "Cargo.toml", CARGO, CARGO + '\n[[test]]\nname = "t"\nharness = false\n'),
    ("cargo", "Cargo.toml", CARGO, CARGO + '\n[patch.crates-io]\nproptest = { path = "evil" }\n'),
    ("cargo", "Cargo.toml", CARGO, CARGO.replace('proptest = "1"', 'proptest = { path = "evil" }')),
    ("cargo", "Cargo.toml", CARGO, CARGO + "\n[lib]\ntest = false\n"),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("COMMAND price_test", "COMMAND true")),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("add_test", "# a.c add_test")),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("total.c\n", 'total.c "x.c\n')),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace("COMMAND price_test", "COMMAND evil.c price_test")),
    ("sources", "CMakeLists.txt", CMAKE, CMAKE.replace(")\nadd_test", ") add_test")),
    ("sources", "rules.mk", "test: a.c\n\t./run\n", "test: a.c b.c \\\n\t./run\n"),
    ("makefile", "Makefile", MAKE, MAKE.replace("PY = pytest", "PY = true")),
    ("makefile", "Makefile", MAKE, MAKE.replace("prepare:\n\ttrue", "prepare:\n\trm -r tests")),
    ("makefile", "Makefile", MAKE, MAKE + "test: PY = true\n"),
    ("makefile", "Makefile", MAKE, MAKE + "include x.mk\n"),
    ("makefile", "Makefile", MAKE, MAKE + "%: PY = true\n"),
    ("makefile", "Makefile", MAKE, MAKE + "N = PY\n$(N) := true\n"),
    ("makefile", "Makefile", MAKE, MAKE.replace("test: prepare", "ifeq (0,1)\ntest: prepare") + "endif\n"),
    ("makefile", "Makefile", MAKE, "SHELL := /bin/true\n" + MAKE),
    ("go_mod", "go.mod", MOD, MOD + "replace a => ./evil\n"),
    ("go_mod", "go.mod", MOD, MOD + "replace (\n\ta => ./evil\n)\n"),
    ("package_json", "package.json", PACKAGE, PACKAGE.replace('"unit": "jest"', '"unit": "true"')),
    ("package_json", "package.json", PACKAGE, PACKAGE.replace("true", "false")),
    ("package_json", "package.json", PACKAGE, PACKAGE.replace('"build"', '"pretest": "exit 0", "build"')),
    ("composer_json", "composer.json", '{"scripts": {"test": ["phpunit"]}}', '{"scripts": {"test": ["true"]}}'),
    ("config", "pyproject.toml", "[tool.black]\nx = 1\n", '[tool.pytest.ini_options]\naddopts = "--co"\n'),
    ("config", "setup.cfg", "[flake8]\nx = 1\n", "[flake8]\nx = 1\n[tool:pytest]\naddopts = --co\n"),
]


@pytest.mark.parametrize(("kind", "path", "base", "patched"), KEPT)
def test_an_honest_change_is_kept(kind: str, path: str, base: str, patched: str) -> None:
    assert restore_runner_settings(kind, path, base.encode(), patched.encode()) == patched.encode()


@pytest.mark.parametrize(("kind", "path", "base", "patched"), NOT_KEPT)
def test_a_change_of_the_runners_part_is_not(kind: str, path: str, base: str, patched: str) -> None:
    found = restore_runner_settings(kind, path, base.encode(), patched.encode())
    assert found != patched.encode()
    if found is not None:  # put back: a second look finds nothing to do
        assert restore_runner_settings(kind, path, base.encode(), found) == found


def test_a_new_makefile_beside_the_one_that_make_finds_is_removed() -> None:
    assert restore_runner_settings("makefile", "GNUmakefile", None, b"all:\n\techo\n") is None


KINDS = [
    ("config", "pyproject.toml"), ("config", "setup.cfg"), ("package_json", "package.json"),
    ("composer_json", "composer.json"), ("makefile", "Makefile"), ("cargo", "Cargo.toml"), ("go_mod", "go.mod"),
    ("sources", "CMakeLists.txt"),
]  # fmt: skip
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
@pytest.mark.parametrize(("kind", "path"), KINDS)
def test_hostile_text_neither_raises_nor_takes_long(kind: str, path: str, hostile: str) -> None:
    patched = HOSTILE[hostile].encode("utf-8", "surrogateescape")
    started = time.process_time()
    restore_runner_settings(kind, path, b"x = 1\n", patched)
    restore_runner_settings(kind, path, None, patched)
    # A bound of the screen, not a measurement: quadratic readers need minutes.
    assert time.process_time() - started < 20


@given(st.sampled_from(KINDS), st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes(kind: tuple[str, str], base: bytes, patched: bytes) -> None:
    restore_runner_settings(*kind, base, patched)
    restore_runner_settings(*kind, None, patched)
