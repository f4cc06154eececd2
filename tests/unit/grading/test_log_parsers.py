"""Outcomes of tests that a runner without a witness prints, compared with the package `swebench`.

`parser_logs.json`: logs in the format of every parser of the package, and the statuses that it gave for them.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from grading import log_parsers
from grading.log_parsers import PARSERS, find_log_parser
from ratchet.errors import GraderFailedError, WorkerHostError

_CORPUS = json.loads((Path(__file__).parent / "parser_logs.json").read_text())
LOGS: dict[str, str] = _CORPUS["logs"]
CASES: list[dict[str, Any]] = _CORPUS["cases"]
_IDS = [f"{case['parser']}, {case['log']}" for case in CASES]
_OUTCOMES = {"PASSED": "passed", "SKIPPED": "skipped", "XFAIL": "xfailed"}
needs_package = pytest.mark.skipif(find_spec("swebench") is None, reason="the package swebench is not installed")


def passed(outcomes: dict[str, str]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome in ("passed", "PASSED")}


@pytest.mark.parametrize("case", [case for case in CASES if case["parser"].removeprefix("parse_log_") in PARSERS])
def test_our_parsers_find_the_tests_that_passed(case: dict[str, Any]) -> None:
    found = PARSERS[case["parser"].removeprefix("parse_log_")](LOGS[case["log"]])
    assert passed(found) == passed(case["statuses"])


@needs_package
@pytest.mark.parametrize("case", CASES, ids=_IDS)
def test_the_packages_parsers_are_taken(case: dict[str, Any]) -> None:
    found = find_log_parser(case["parser"], case["row"])(LOGS[case["log"]])
    assert found == {name: _OUTCOMES.get(status, "failed") for name, status in case["statuses"].items()}


def test_every_parser_of_the_package_has_a_log() -> None:
    assert len({case["parser"] for case in CASES}) == 57 and all(case["statuses"] for case in CASES)


_DJANGO = """test_a (m.C) ... WARNING: a deprecated call
ok
test_b (m.C)
It has a docstring. ... ok
test_c (m.C) ... one line
another line
FAIL
test_d (m.C) ... skipped 'no network'
test_e (m.C) ... started and never ended
test_f (m.C) ... ok
ok
"""


def test_what_a_test_prints_stands_before_its_outcome() -> None:
    assert PARSERS["django"](_DJANGO) == {
        "test_a (m.C)": "passed",
        "It has a docstring.": "passed",
        "test_c (m.C)": "failed",
        "test_d (m.C)": "skipped",
        "test_f (m.C)": "passed",
    }


_DOTS = """A name with ... dots ... ok
#12 - SELECT ... FROM works ... skipped 'a ... b'
test_b (m.C) ... x.py:3: Warning: this ... ends ... ok
ok
test_c (m.C) ... waits ... and goes on
FAIL
test_d (m.C) ... Applying sites.0001_initial... OK
ok
Applying sites.0002_name...test_e (m.C) ... ok
"""


def test_dots_in_names_and_in_what_is_printed() -> None:
    found = PARSERS["django"](_DOTS)
    assert {"A name with ... dots", "test_b (m.C)", "test_d (m.C)", "test_e (m.C)"} <= passed(found)
    assert (found["#12 - SELECT ... FROM works"], found["test_c (m.C)"]) == ("skipped", "failed")
    assert not find_spec("swebench") or passed(find_log_parser("parse_log_django")(_DOTS)) <= passed(found)


def test_the_runners_own_ok_is_no_tests() -> None:
    log = "Checks the x ... y case ... ok\n\n-----\nRan 1 test in 0.1s\n\nOK\n"
    assert PARSERS["django"](log) == {"Checks the x ... y case": "passed"}


_PRINTED = (
    "",
    "Internal Server Error: /x/\nTraceback (most recent call last):\n  File 'v.py', line 1, in get\n",
    "Testing against Django installed in '/t'\nSystem check identified no issues (0 silenced).\n",
    "/t/x.py:3: RemovedInDjango40Warning: old\n  warn('x')\n",
    "Creating table a\n\n",
)
_ENDS = {"passed": ("ok", "OK", " OK"), "failed": ("FAIL", "ERROR"), "skipped": ("skipped 'no network'",)}


@pytest.mark.parametrize("seed", range(40))
def test_generated_logs_of_django(seed: int) -> None:
    """Each test's outcome is found behind any other text. A block `FAIL:` below wins over a printed `ok`."""
    rng = random.Random(seed)
    log, expected = "", {}
    for number in range(12):
        outcome = rng.choice(list(_ENDS))
        end = rng.choice(_ENDS[outcome])
        name = f"test_{number} (a.tests.T.test_{number})"
        log += name
        if rng.random() < 0.3:
            name = f"It does {number} things."
            log += f"\n{name}"
        printed = rng.choice(_PRINTED) if end in ("ok", "FAIL", "ERROR") else ""
        log += f" ... {printed}{end}\n"
        expected[name] = outcome
    assert PARSERS["django"](log) == expected
    broken = rng.choice(list(expected))
    assert PARSERS["django"](f"{log}\n=====\nFAIL: {broken}\n")[broken] == "failed"
    if find_spec("swebench") is not None:
        theirs = passed(find_log_parser("parse_log_django")(log))
        assert theirs == passed(expected)


_PACKAGE = """
def _last(log, spec):
    return {"test_a (m.C)": "PASSED", "test_b (m.C)": "PASSED", spec.instance_id: "XFAIL", spec.version: "OTHER"}

def _raises(log, spec):
    raise KeyError("tests")

PARSER_REGISTRY = {"parse_log_django": _last, "parse_log_prismjs": _raises}
"""


Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Make a package `swebench` whose module of parsers has the given source, until the test ends."""
    if find_spec("swebench") is not None:
        pytest.skip("the real package is installed")

    def made(source: str) -> None:
        parsers = tmp_path / "swebench" / "harness" / "log_parsers"
        parsers.mkdir(parents=True)
        (parsers / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("swebench", "swebench.harness", "swebench.harness.log_parsers"):  # forgotten again after the test
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
        log_parsers._of_package.cache_clear()

    yield made
    log_parsers._of_package.cache_clear()


@pytest.mark.parametrize("source", ["import no_such_dependency\n", "1 / 0\n", "PARSER_REGISTRY = (\n"])
def test_a_package_that_cannot_be_imported_hinders_no_parser_of_ours(install: Install, source: str) -> None:
    install(source)
    with capture_logs() as logged:
        assert find_log_parser("pytest") is PARSERS["pytest"] and find_log_parser("django") is PARSERS["django"]
    assert len(logged) == 1 and "swebench" in logged[0]["event"] and "Error" in logged[0]["error"]
    with pytest.raises(GraderFailedError, match=r"no log parser 'parse_log_ruby'.*swebench"):
        find_log_parser("parse_log_ruby")


@pytest.mark.parametrize("raised", ["MemoryError()", "OSError(24, 'Too many open files')"])
def test_a_package_that_the_machine_could_not_import_is_asked_again(
    install: Install, raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(f"import sys\nif not hasattr(sys, 'has_room'):\n    raise {raised}\n{_PACKAGE}")
    with pytest.raises(WorkerHostError, match="cannot import `swebench` now"):
        find_log_parser("django")
    monkeypatch.setattr(sys, "has_room", True, raising=False)
    assert find_log_parser("django") is not PARSERS["django"]


def test_an_installed_package_is_asked(install: Install) -> None:
    install(_PACKAGE)
    parse = find_log_parser("django", {"instance_id": "django-1", "version": 3.0})
    assert parse("FAIL: test_b (m.C)\n") == {
        "test_a (m.C)": "passed",
        "test_b (m.C)": "failed",
        "django-1": "xfailed",
        "3.0": "failed",
    }
    with pytest.raises(GraderFailedError, match=r"'parse_log_prismjs' failed: KeyError: 'tests'"):
        find_log_parser("parse_log_prismjs")("x")
    assert find_log_parser("unittest") is PARSERS["unittest"]
    with pytest.raises(GraderFailedError, match="no log parser 'parse_log_cobol'"):
        find_log_parser("parse_log_cobol")
