"""The programs that a test run starts are found in commands and settings, and the product is not taken for one."""

import time

import pytest

from grading.runner_programs import find_programs


@pytest.mark.parametrize(
    ("settings", "path", "expected"),
    [
        ({"package.json": '{"scripts": {"test": "node scripts/run --all"}}'}, "scripts/run.js", True),
        ({"package.json": '{"scripts": {"test": "npm run a", "a": "bash ./ci/a.sh"}}'}, "ci/a.sh", True),
        ({"package.json": '{"scripts": {"build": "node scripts/build.js"}}'}, "scripts/build.js", False),
        ({"package.json": '{"scripts": {"test": "FOO=1 mocha -r ./test/setup"}}'}, "test/setup.js", True),
        ({"app/package.json": '{"scripts": {"test": "node run"}}'}, "app/run/index.js", False),
        ({"app/package.json": '{"scripts": {"test": "node ./run"}}'}, "app/run/index.js", True),
        ({"package.json": "[" * 100_000}, "src/index.js", False),
        ({"package.json": '["scripts"]'}, "src/index.js", False),
        ({"Makefile": "test: all\n\t@./run_all.sh\nall:\n\tpython tools/all.py\n"}, "tools/all.py", True),
        ({"Makefile": "build:\n\tpython tools/all.py\n"}, "tools/all.py", False),
        ({"tox.ini": "[testenv]\ncommands =\n    python -m tools.check {posargs}\n"}, "tools/check.py", True),
    ],
)
def test_settings(settings: dict[str, str], path: str, expected: bool) -> None:
    assert find_programs(settings, ()).starts(path) == expected


@pytest.mark.parametrize(
    ("command", "path", "expected"),
    [
        ("cd /w && bash scripts/all.sh 2>&1 | tee log", "scripts/all.sh", True),
        ("./run_tests --fast", "run_tests", True),
        ("python tests/runtests.py -v", "tests/runtests.py", True),
        ("python shop/main.py", "shop/main.py", False),
        ("python -m pytest tests/test_a.py", "tests/test_a.py", False),
    ],
)
def test_commands(command: str, path: str, expected: bool) -> None:
    assert find_programs({}, (command,)).starts(path) == expected


@pytest.mark.parametrize("word", ["test ", "-r ", "a;", "'", "$(", "a=", "import: ", "require['", "-p ", "include "])
def test_long_texts_take_linear_time(word: str) -> None:
    text = word * 100_000
    started = time.process_time()
    find_programs({name: text for name in ("tox.ini", "Makefile", "justfile", "jest.config.js", "pytest.ini")}, (text,))
    # A bound of the screen, not a measurement: quadratic matching needs minutes.
    assert time.process_time() - started < 20
