"""Logs of runners: how many tests ran, and what was not found."""

import pytest

from grading.printed_results import count_printed_results, count_printed_tests, find_missing_program

RAN = {
    "pytest": ("= 1 failed, 2 passed, 1 skipped in 0.12s =", 3),
    "pytest, quiet": ("..\n2 passed in 0.01s\n", 2),
    "unittest": ("Ran 3 tests in 0.001s\n\nOK (skipped=1)\n", 2),
    "django": ("System check identified no issues (0 silenced).\n\nRan 12 tests in 1.2s\n\nOK\n", 12),
    "go": ("?   \tshop/cmd\t[no test files]\nok  \tshop\t0.004s\n", 1),
    "go, cached": ("ok  \tshop\t(cached)\n", 1),
    "go, failing": ("--- FAIL: TestTotal (0.00s)\nFAIL\nFAIL\tshop\t0.004s\n", 2),
    "cargo": ("running 2 tests\ntest result: FAILED. 1 passed; 1 failed; 0 ignored\n\nrunning 0 tests\n", 2),
    "jest": ("Tests:       1 failed, 2 passed, 3 total\n", 3),
    "vitest": (" Test Files  1 passed (1)\n      Tests  2 passed (2)\n", 2),
    "node": ("ℹ tests 2\nℹ pass 1\nℹ fail 1\n", 2),
    "node, TAP": ("ok 1 - total\nnot ok 2 - discount\n1..2\n# pass 1\n# fail 1\n", 4),
    "mocha": ("  2 passing (4ms)\n  1 failing\n", 3),
    "rspec": ("3 examples, 1 failure\n", 3),
    "phpunit": ("OK (2 tests, 2 assertions)\n", 2),
    "surefire": ("[INFO] Tests run: 4, Failures: 0, Errors: 0, Skipped: 0\n", 4),
    "gradle": ("> Task :compileJava NO-SOURCE\n> Task :app:test\nBUILD SUCCESSFUL in 1s\n", 1),
    "ctest": ("100% tests passed, 0 tests failed out of 5\n", 5),
    "googletest": ("[==========] 3 tests from 1 test suite ran.\n", 3),
    "prove": ("All tests successful.\nFiles=1, Tests=3,  0 wallclock secs\n", 3),
    "deno": ("ok | 2 passed | 0 failed (3ms)\n", 2),
}
NOTHING_RAN = {
    "pytest": "\nno tests ran in 0.01s\n",
    "pytest, deselected": "= 3 deselected in 0.01s =\n",
    "pytest, skipped": "s\n1 skipped in 0.01s\n",
    "unittest": "\nRan 0 tests in 0.000s\n\nOK\n",
    "unittest, skipped": "Ran 2 tests in 0.000s\n\nOK (skipped=2)\n",
    "unittest of 3.12": "Ran 0 tests in 0.000s\n\nNO TESTS RAN\n",
    "go": "?   \tshop\t[no test files]\n",
    "go, -run": "testing: warning: no tests to run\nPASS\nok  \tshop\t0.003s [no tests to run]\n",
    "go, does not build": "?   \tshop/cmd\t[no test files]\nFAIL\tshop [build failed]\nFAIL\n",
    "cargo": "running 0 tests\n\ntest result: ok. 0 passed; 0 failed; 0 ignored\n",
    "cargo, cut off": "   Finished test\nrunning 0 tests\n",
    "jest": "No tests found, exiting with code 0\n",
    "jest, skipped": "Tests:       3 skipped, 3 total\nTests: 0 passed\n",
    "vitest": "No test files found, exiting with code 0\n",
    "node": "ℹ tests 0\nℹ pass 0\nℹ fail 0\n",
    "TAP": "TAP version 13\n1..0\n",
    "mocha": "  0 passing (1ms)\n",
    "rspec": "0 examples, 0 failures\n",
    "minitest": "0 runs, 0 assertions, 0 failures, 0 errors, 0 skips\n",
    "phpunit": "No tests executed!\n",
    "surefire": "[INFO] No tests to run.\n",
    "gradle": "> Task :test NO-SOURCE\n",
    "ctest": "No tests were found!!!\n",
    "make": "make[1]: Entering directory '/w'\nmake[1]: Nothing to be done for 'test'.\n",
    "make, of another": "make: 'test' is up to date.\n",
    "prove": "Files=0, Tests=0,  0 wallclock secs\nResult: NOTESTS\n",
}
UNKNOWN = (
    "",
    "3 checks passed\n",
    "all is well\n",
    "make: Nothing to be done for 'all'.\n3 checks passed\n",
    "./price.go:3:1: syntax error\nFAIL\tshop [build failed]\n",
    "error: could not compile `shop`\n",
)
MISSING = (
    "bash: line 1: uvx: command not found",
    "bash: uvx: command not found",
    "/tests/test.sh: line 2: uvx: command not found",
    "test.sh: line 3: ./run.sh: Permission denied",
    "bash: tests/run.sh: No such file or directory",
    "sh: 1: jest: not found",
    "run.sh: 2: pytest: not found",
    "sh: 0: cannot open run.sh: No such file",
    "/usr/bin/env: ‘bats’: No such file or directory",
    "/usr/bin/python3: No module named pytest",
    "python: can't open file '/w/run.py': [Errno 2] No such file or directory",
    "make: *** No rule to make target 'test'.  Stop.",
    "make: jest: No such file or directory",
    'npm error Missing script: "test"',
    "timeout: failed to run command ‘x’: No such file or directory",
    "curl: (6) Could not resolve host: example.invalid",
    "npm error network request failed, reason: getaddrinfo EAI_AGAIN registry",
    "E: Unable to locate package curl",
    "E: Package 'python3-pytest' has no installation candidate",
    "E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: Permission denied)",
    "E: Failed to fetch http://deb.example.invalid/pool/c/curl.deb  Connection failed [IP: 10.0.0.1 80]",
    "ERROR: Could not find a version that satisfies the requirement pytest==8.4.1 (from versions: none)",
    "ERROR: unable to select packages:",
)


@pytest.mark.parametrize("name", RAN)
def test_tests_that_ran_are_counted(name: str) -> None:
    log, count = RAN[name]
    assert count_printed_tests(f"building\n{log}") == count


@pytest.mark.parametrize("name", NOTHING_RAN)
def test_a_runner_that_ran_nothing_says_so(name: str) -> None:
    assert count_printed_tests(NOTHING_RAN[name]) == 0


@pytest.mark.parametrize("log", UNKNOWN)
def test_another_programs_log_says_nothing(log: str) -> None:
    assert count_printed_tests(log) is None and not find_missing_program(log)


@pytest.mark.parametrize("line", MISSING)
def test_what_was_not_found_is_named(line: str) -> None:
    assert find_missing_program(f"building\n{line}\nend\n") == line


@pytest.mark.parametrize(
    "log", ["Error: file not found\n", "the command not found in the list\n", "x: 1: y\n", "ERROR: Could not find x\n"]
)
def test_a_products_own_words_are_no_missing_program(log: str) -> None:
    assert not find_missing_program(log)


@pytest.mark.parametrize(
    "piece", ["\n", " ", "1 passed ", "ok ", "a: ", "make: x\n", "Tests: 1 ", "Ran 1 tests in", "/", "\\"]
)
def test_a_long_log_of_a_hostile_product_is_searched_at_once(piece: str) -> None:
    log = piece * (8_000_000 // len(piece))
    assert count_printed_tests(log) in (None, 0) or "make" in piece
    assert not find_missing_program(log)


def test_a_printed_line_takes_no_test_away() -> None:
    """The code under test can print what it likes beside the runner's own lines."""
    forged = "OK (skipped=5)\nRan 5 tests in 0.1s\n\nOK (skipped=5)\n"
    assert count_printed_tests(f"{forged}Ran 5 tests in 0.001s\n\nFAILED (failures=5)\n") == 5


GO_GOLD = (
    "=== RUN   TestTotal\n--- PASS: TestTotal (0.00s)\nPASS\nok  \tshop\t0.003s\n"
    "=== RUN   TestZero\n--- PASS: TestZero (0.00s)\nPASS\nok  \tshop/zero\t0.002s\n"
)
CARGO = "running {0} tests\n\ntest result: ok. {0} passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n\n"


@pytest.mark.parametrize(
    ("log", "number"),
    [
        (GO_GOLD, 4),
        ("ok  \tshop\t0.003s\n=== RUN   TestZero\n--- PASS: TestZero (0.00s)\nPASS\nok  \tshop/zero\t0.002s\n", 3),
        (CARGO.format(3) + CARGO.format(5) + CARGO.format(0), 4),
        ("\nrunning 3 tests\n" + CARGO.format(5) + CARGO.format(0), 2),
        ("test price::tests::test_1 ... ok\ntest price::tests::test_2 ... ok\n", 0),
        ("TAP version 13\nok 1 - total\nok 2 - discount\n1..2\n# pass 2\n", 3),
        ("TAP version 13\nok 1 - test/price.test.js\n1..1\n# pass 1\n", 2),
        ("✓  price (1ms)\nDONE 2 tests in 0.1s\n", 1),
        ("∅  price (1ms)\nDONE 0 tests in 0.1s\n", 0),
        ("3 checks passed\nall 12 tests OK\n0 tests passed\n", 2),
        ("", 0),
    ],
)
def test_results_are_counted_not_tests(log: str, number: int) -> None:
    """So a gold patch that adds tests inside of the product's own files, as in Rust, makes no difference."""
    assert count_printed_results(log) == number
