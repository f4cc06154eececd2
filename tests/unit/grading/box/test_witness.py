"""Reports of the witness about the code that tests run: each is played by a real pytest, with and without changes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grading.oracle import is_code_missing, name_digest

_BOX = Path(__file__).parents[4] / "grading" / "box"
_TESTS = """\
import functools

import pytest

from product import CASES, Checks, repeat


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    assert case


def test_plain():
    assert 1 + 1 == 2


@repeat(2)
def test_decorated():
    assert len("ab") == 2


class TestMethods(Checks):
    def test_own(self):
        assert self.limit > 0
"""
_PRODUCT = """\
CASES = ["a", "b"]


class Checks:
    limit = 1

    def test_inherited(self):
        assert self.limit == 1


def repeat(times):
    def decorate(function):
        def call():
            for _ in range(times):
                function()
        return call
    return decorate
"""
_REPEAT = _PRODUCT[_PRODUCT.index("def repeat") :]


@dataclass(frozen=True)
class _Run:
    """The report of the witness. `names`: digests of the names of tests that ran."""

    codes: frozenset[str]
    names: frozenset[str]

    @property
    def changed(self) -> bool:
        return "changed" in self.codes

    def differs_from(self, gold: "_Run") -> bool:
        return is_code_missing(sorted(gold.codes), self.codes, self.names)


def _frames(
    directory: Path,
    product: str = _PRODUCT,
    tests: str = _TESTS,
    conftest: str = "",
    selected: Sequence[str] | None = None,
    arguments: Sequence[str] = ("test_it.py",),
) -> list[dict[str, Any]]:
    """Run pytest with each of `arguments` until it fails, and return the reports. `selected`: names of the tests to
    run."""
    witness = directory / "witness"
    witness.mkdir(parents=True)
    (witness / "patched").write_bytes(b"product.py\0")
    (witness / "nonce").write_text("n" * 32 + "\n")
    os.mkfifo(witness / "frames")
    if selected is not None:
        (witness / "selected").write_text("\n".join(map(name_digest, selected)))
    shutil.copy(_BOX / "witness.py", witness / "ratchet_witness.py")
    for name, text in {"product.py": product, "test_it.py": tests, "conftest.py": conftest}.items():
        (directory / name).write_text(text)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "RATCHET_WITNESS": str(witness),
        "RATCHET_WORKDIR": str(directory),
        "PYTEST_PLUGINS": "ratchet_witness",
        "PYTHONPATH": f"{witness}:{directory}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = f"{sys.executable} -B -m pytest -q -p no:cacheprovider --rootdir . "
    with open(directory / "reports", "wb") as reports:
        reader = subprocess.Popen(["cat", witness / "frames"], stdout=reports)
    with open(witness / "frames", "wb"):
        line = " && ".join(command + one for one in arguments)
        subprocess.run(line, shell=True, cwd=directory, env=environment, check=False, capture_output=True, timeout=600)
    reader.wait()
    return [json.loads(line.partition(" ")[2]) for line in (directory / "reports").read_text().splitlines()]


def _play(directory: Path, product: str = _PRODUCT, tests: str = _TESTS, takeover: str = "") -> _Run:
    """Run the tests on a product. `takeover`: code of the product that changes the session."""
    frames = _frames(directory, product, tests, takeover)
    modules = [frame for frame in frames if frame["kind"] == "module"]
    assert modules and len({frame["path"] for frame in modules}) == 1, frames
    return _Run(
        frozenset(code for frame in modules for code in frame["codes"]),
        frozenset(name_digest(frame["name"]) for frame in frames if frame["kind"] == "test"),
    )


@pytest.fixture(scope="module")
def gold(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    found = _play(tmp_path_factory.mktemp("gold"))
    assert len(found.names) == 5 and not found.changed
    # The plain ones and the method are also run as they are; the inherited test is the product's.
    assert sorted(code[:8] for code in found.codes) == sorted(
        [name_digest(f"test_it.py::{name}") for name in ("test_case", "test_plain", "TestMethods::test_own")] * 2
        + [name_digest("test_it.py::test_decorated")]
    )
    return found


_HONEST = {
    "one more parameter": _PRODUCT.replace('"b"', '"b", "c"'),
    "fewer parameters": _PRODUCT.replace(', "b"', ""),
    "a decorator in another way": _PRODUCT.replace("for _ in range(times):", "while True:").replace(
        "function()\n", "function()\n                return\n"
    ),
    "a decorator that is a class": _PRODUCT.replace(
        _REPEAT,
        "import functools\n\n\nclass Repeat:\n    def __init__(self, times, function):\n        self.times = times\n"
        "        self.function = function\n\n    def run(self):\n        for _ in range(self.times):\n"
        "            self.function()\n\n\ndef repeat(times):\n    def decorate(function):\n"
        "        held = Repeat(times, function)\n        return lambda: held.run()\n    return decorate\n",
    ),
    "a decorator that keeps the function": _PRODUCT.replace(
        _REPEAT, "def repeat(times):\n    return lambda one: one\n"
    ),
    "a base class in another way": _PRODUCT.replace("== 1", "< 2"),
    "one more inherited test": _PRODUCT.replace(
        "def repeat", "    def test_more(self):\n        pass\n\n\ndef repeat", 1
    ),
}


@pytest.mark.parametrize("product", _HONEST.values(), ids=_HONEST)
def test_the_products_code_and_the_number_of_parameters_are_no_difference(
    gold: _Run, tmp_path: Path, product: str
) -> None:
    assert product != _PRODUCT
    found = _play(tmp_path / "found", product)
    assert not found.changed and not found.differs_from(gold)


_EACH = "import functools, types\n\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
_TAKEOVERS = {
    "the product's function": f"{_EACH}        item.obj = lambda *a, **k: None\n",
    "one parameter's": f"{_EACH}        if item.name == 'test_case[b]':\n            item.obj = lambda case: None\n",
    "one that holds the true one": (
        f"{_EACH}        if item.name == 'test_plain':\n            item.obj = lambda kept=item.obj: None\n"
    ),
    "one that says it wraps the true one": (
        f"{_EACH}        if item.name == 'test_plain':\n"
        "            item.obj = functools.wraps(item.obj)(lambda: None)\n"
    ),
    "a partial with the true one": (
        f"{_EACH}        if item.name == 'test_plain':\n            item.obj = functools.partial(bool, item.obj)\n"
    ),
    "one that says it is from the test file": (
        f"{_EACH}        if item.name == 'test_plain':\n"
        "            line = chr(10) * (item.obj.__code__.co_firstlineno - 1)\n"
        "            names = {}\n"
        "            exec(compile(line + 'def test_plain(): pass', item.obj.__code__.co_filename, 'exec'), names)\n"
        "            item.obj = names['test_plain']\n"
    ),
    "another test's": (
        f"{_EACH}        if item.name == 'test_plain':\n            kept = item.obj\n"
        "    for item in items:\n        if item.name == 'test_own':\n"
        "            item.obj.__func__.__code__ = kept.__code__\n"
    ),
    "a decorated one's": f"{_EACH}        if item.name == 'test_decorated':\n            item.obj = lambda: None\n",
}


@pytest.mark.parametrize("takeover", _TAKEOVERS.values(), ids=_TAKEOVERS)
def test_a_test_that_is_replaced_is_noticed(gold: _Run, tmp_path: Path, takeover: str) -> None:
    found = _play(tmp_path / "found", takeover=takeover)
    assert found.names == gold.names and found.differs_from(gold)


_SETUP = "import functools\n\n\ndef pytest_runtest_setup(item):\n    if item.name == 'test_plain':\n"


@pytest.mark.parametrize(
    ("takeover", "changed"),
    [
        (f"{_SETUP}        item.obj.__code__ = (lambda: None).__code__\n", True),
        (f"{_SETUP}        item.obj = lambda: None\n", True),
        (f"{_SETUP}        item.obj = lambda kept=item.obj: None\n", True),
        # pytest-asyncio and others put such a wrapper around a coroutine when it is run.
        (f"{_SETUP}        item.obj = functools.wraps(item.obj)(lambda test=item.obj: test())\n", False),
        (f"{_SETUP}        import plugin\n        item.obj = plugin.synchronous(item.obj)\n", False),
    ],
)
def test_code_that_is_replaced_while_tests_run_is_noticed(
    gold: _Run, tmp_path: Path, takeover: str, changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "plugin.py").write_text("def synchronous(test):\n    return lambda: test()\n")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    found = _play(tmp_path / "found", takeover=takeover)
    assert found.changed == changed and (changed or found.codes == gold.codes)


def test_a_file_of_many_tests_is_told_in_several_lines(tmp_path: Path) -> None:
    tests = "".join(f"def test_{number}():\n    assert {number} >= 0\n\n\n" for number in range(200))
    found = _play(tmp_path / "found", tests=tests)
    assert len(found.names) == 200 and len(found.codes) == 400
    assert max(map(len, (tmp_path / "found" / "reports").read_text().splitlines())) < 4096


def test_the_environment_does_not_tell_parameters(tmp_path: Path) -> None:
    """The name of a parametrized test often has the expected value, which would be the true one in control runs."""
    product = (
        "import os\n\n\ndef current():\n    with open('names', 'a') as names:\n"
        "        names.write(os.environ['PYTEST_CURRENT_TEST'] + '\\n')\n"
    )
    tests = (
        "import pytest\nfrom product import current\n\n\n@pytest.fixture\ndef made():\n    current()\n\n\n"
        "@pytest.mark.parametrize(('given', 'wanted'), [(1, 41), (2, 42)])\ndef test_it(made, given, wanted):\n"
        "    current()\n\n\ndef test_other():\n    current()\n"
    )
    told = _play(tmp_path, product, tests)
    assert not told.changed and len(told.names) == 2
    numbered = [f"test_it.py::test_it[{number}] ({when})" for number in (0, 1) for when in ("setup", "call")]
    assert (tmp_path / "names").read_text().splitlines() == [*numbered, "test_it.py::test_other (call)"]


_PLUGINS_REPORTS = """
import pytest


@pytest.fixture(autouse=True)
def told(request):
    for when, outcome in (("call", "rerun"), ("???", "failed")):
        report = pytest.TestReport(f"test_it.py::{outcome}", ("test_it.py", 1, ""), {}, outcome, "", when)
        request.config.hook.pytest_runtest_logreport(report=report)
"""


def test_a_try_that_runs_again_and_a_dead_worker_are_no_tests_result(gold: _Run, tmp_path: Path) -> None:
    """pytest-rerunfailures reports the one, pytest-xdist the other."""
    assert _play(tmp_path / "found", takeover=_PLUGINS_REPORTS).names == gold.names


def _ran(frames: list[dict[str, Any]]) -> list[str]:
    return sorted(frame["name"] for frame in frames if frame["kind"] == "test")


def _ends(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [frame for frame in frames if frame["kind"] == "end"]


_SELECTED = ["test_it.py::test_case[a]", "test_it.py::TestMethods::test_own"]
_CASES = ["test_it.py::test_case[a]", "test_it.py::test_case[b]"]
_SORTS = """
import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name)


def pytest_deselected(items):
    assert {item.name for item in items} == {"test_plain", "test_decorated", "test_inherited"}
"""


@pytest.mark.parametrize("options", ("--strict-markers -x", "-n 2 -p no:randomly"))
def test_only_selected_tests_run_and_the_canary(tmp_path: Path, options: str) -> None:
    """A function is selected with all its parameters, whose names a product may choose."""
    frames = _frames(tmp_path, conftest=_SORTS, selected=_SELECTED, arguments=[f"test_it.py {options}"])
    assert _ran(frames) == sorted(["test_it.py::TestMethods::test_own", *_CASES])
    ends = _ends(frames)
    assert {end["missed"] for end in ends} == {0} and {end["exit"] for end in ends} == {0}
    assert {end["canary"] for end in ends} == ({"failed", "none"} if "-n" in options else {"failed"})
    codes = {code for frame in frames if frame["kind"] == "module" for code in frame["codes"]}
    assert {code[:8] for code in codes} == {name_digest(name) for name in _SELECTED}


_SHARED = """
import pytest

MADE = []


@pytest.fixture(scope="session", autouse=True)
def made():
    MADE.append(1)


def test_before():
    MADE.append(2)


def test_alone():
    assert MADE[0] == 1


def test_after():
    assert MADE == [1, 2]
"""


def test_a_test_that_needs_an_earlier_one_fails_alone_and_fixtures_run(tmp_path: Path) -> None:
    selected = ["test_it.py::test_alone", "test_it.py::test_after"]
    frames = _frames(tmp_path, tests=_SHARED, selected=selected)
    outcomes = {frame["name"]: frame["outcome"] for frame in frames if frame["kind"] == "test"}
    assert outcomes == {"test_it.py::test_alone": "passed", "test_it.py::test_after": "failed"}


def test_a_session_without_a_selected_test_stops_no_command(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_more():\n    pass\n")
    frames = _frames(tmp_path, selected=["test_two.py::test_more"], arguments=["test_it.py", "test_two.py"])
    assert [(end["exit"], end["canary"]) for end in _ends(frames)] == [(5, "none"), (0, "failed")]
    assert _ran(frames) == ["test_two.py::test_more"]


_NESTED = """
import os, subprocess, sys


def test_runs_pytest():
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", "inner.py"]).returncode
    assert code == 0


def test_other():
    pass
"""


def test_a_session_that_a_test_starts_runs_all_its_tests(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("def test_inner():\n    pass\n")
    frames = _frames(tmp_path, tests=_NESTED, selected=["test_it.py::test_runs_pytest"])
    assert _ran(frames) == ["inner.py::test_inner", "test_it.py::test_runs_pytest"]


_PUT_IN_PLACE = {
    "time.time": "import time\ntime.time = lambda: 0.0\n",
    "time.monotonic": "import functools, time\ntime.monotonic = functools.partial(float, 1)\n",
    "time.perf_counter": "import time\ntime.perf_counter = time.process_time\n",
    "random.random": "def half():\n    return 0.5\n\n\nimport random\nrandom.random = half\n",
    "datetime.datetime": (
        "import datetime\n\n\nclass Other(datetime.datetime):\n    pass\n\n\ndatetime.datetime = Other\n"
    ),
    "pathlib.Path.read_text": "import pathlib\npathlib.Path.read_text = lambda self, *a, **k: ''\n",
    "builtins.open": "import builtins, io\nbuiltins.open = lambda *a, **k: io.open(*a, **k)\n",
    "json.loads": "import json\nexec('json.loads = lambda text: None')\n",
    "unittest.mock.NonCallableMock.assert_called_once": (
        "from unittest import mock\nmock.NonCallableMock.assert_called_once = lambda self: None\n"
    ),
}


def _replaced(frames: list[dict[str, Any]]) -> set[str]:
    return {frame["place"] for frame in frames if frame["kind"] == "flag"}


@pytest.mark.parametrize("when", ["at import", "while tests run"])
def test_what_the_patch_puts_in_place_of_functions_that_tests_call_is_named(tmp_path: Path, when: str) -> None:
    code = "".join(_PUT_IN_PLACE.values())
    late = "def replace():\n" + "".join(f"    {line}\n" for line in code.splitlines())
    called = _PRODUCT.replace("        def call():\n", "        def call():\n            replace()\n")
    product = code + _PRODUCT if when == "at import" else late + called
    assert _replaced(_frames(tmp_path, product)) == {*_PUT_IN_PLACE}


_STOOD_STILL = """
import time

import pytest


@pytest.fixture(autouse=True)
def still(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)


time.sleep = lambda seconds: None
"""


def test_what_tests_replace_is_not_named(tmp_path: Path) -> None:
    """A conftest.py of the base replaces a function for all tests, and a fixture another for each of them."""
    product = "import math\nmath.half = lambda x: x / 2\n" + _PRODUCT
    assert _replaced(_frames(tmp_path, product, conftest=_STOOD_STILL)) == set()
