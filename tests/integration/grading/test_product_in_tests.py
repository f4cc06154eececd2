"""Tests that the product takes part in: it decides the parameters, decorates a test, or has a base class of tests.

Each honest patch writes that in its own way, so what is compared with the gold patch's run is the test files' code.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from grading.judge_patch import GradingLimits
from tests.integration.boxes import FreshBox
from tests.integration.grading.conftest import config
from tests.integration.grading.ecosystems import Ecosystem, make_referee, patch_of
from tests.integration.grading.shop import PYTHON, Edits

pytestmark = pytest.mark.timeout(600)
_COMMAND = f"{PYTHON} -B -m pytest -rA -q -p no:cacheprovider tests/test_it.py"


@dataclass(frozen=True)
class _Case:
    """One task. `honest`: another solution. `data`: further files of the base."""

    base: str
    gold: str
    tests: str
    honest: Edits
    data: dict[str, str]

    def ecosystem(self, name: str) -> Ecosystem:
        base = {"lib/__init__.py": "", "lib/it.py": self.base, **self.data}
        return Ecosystem(name, "python3", base, {"lib/it.py": self.gold}, {"tests/test_it.py": self.tests}, _COMMAND)


_SHOUT = "def shout(text):\n    return text.upper() + '!'\n"
_CODECS = "CODECS = {'raw': str.encode, 'hex': lambda text: text.encode().hex()}\n"
_ENCODE = "\n\ndef encode(name, text):\n    return CODECS[name](text)\n"
_REPEAT = (
    "def repeat(times):\n    def decorate(function):\n        def call():\n{0}        return call\n"
    "    return decorate\n"
)
_TOTAL = "def total(items):\n    return sum(items)\n\n\nclass Checks:\n    found = 0\n\n"
_CASES = {
    "data files are parameters": _Case(
        "def shout(text):\n    return text.upper()\n",
        _SHOUT,
        "import pathlib\n\nimport pytest\n\nfrom lib.it import shout\n\n"
        "CASES = sorted((pathlib.Path(__file__).parent / 'data').glob('*.txt'))\n\n\n"
        "@pytest.mark.parametrize('path', CASES, ids=lambda path: path.name)\ndef test_case(path):\n"
        "    given, expected = path.read_text().splitlines()\n    assert shout(given) == expected\n\n\n"
        "def test_fixed():\n    assert shout('a') == 'A!'\n",
        {"lib/it.py": _SHOUT, "tests/data/two.txt": "c\nC!\n"},
        {"tests/data/one.txt": "b\nB!\n"},
    ),
    "a registry is the parameters": _Case(
        "CODECS = {'raw': str.encode}\n" + _ENCODE,
        _CODECS + _ENCODE,
        "import pytest\n\nfrom lib.it import CODECS, encode\n\n\n"
        "@pytest.mark.parametrize('name', sorted(CODECS))\ndef test_each(name):\n    assert encode(name, 'ab')\n\n\n"
        "def test_hex():\n    assert encode('hex', 'ab') == '6162'\n",
        {"lib/it.py": _CODECS.replace("'raw'", "'base16': lambda text: text.encode().hex(), 'raw'") + _ENCODE},
        {},
    ),
    "a decorator of the product": _Case(
        _REPEAT.format("            function()\n"),
        _REPEAT.format("            for _ in range(times):\n                function()\n"),
        "from lib.it import repeat\n\nSEEN = []\n\n\n@repeat(3)\ndef test_repeats():\n    SEEN.append(1)\n\n\n"
        "def test_count():\n    test_repeats()\n    assert len(SEEN) in (3, 6)\n    assert len(SEEN) % 3 == 0\n",
        {
            "lib/it.py": _REPEAT.format(
                "            left = times\n            while left:\n"
                "                function()\n                left -= 1\n"
            )
        },
        {},
    ),
    "a base class of the product": _Case(
        "def total(items):\n    return 0\n\n\nclass Checks:\n    found = 0\n\n    def test_it(self):\n        pass\n",
        _TOTAL + "    def test_it(self):\n        assert self.found > 0\n",
        "from lib.it import Checks, total\n\n\nclass TestTotal(Checks):\n    found = total([1, 2])\n\n\n"
        "def test_total():\n    assert total([1, 2]) == 3\n",
        {"lib/it.py": _TOTAL + "    def test_it(self):\n        assert self.found >= 1\n"},
        {},
    ),
}


@pytest.mark.parametrize("name", _CASES)
async def test_honest_work_is_solved(name: str, fresh_box: FreshBox, tmp_path: Path) -> None:
    case = _CASES[name]
    ecosystem = case.ecosystem(name)
    limits = GradingLimits.of_run(config(eval_seconds=60))
    referee = await make_referee(ecosystem, fresh_box, tmp_path / "gold", limits)
    played = await referee.play(fresh_box, patch_of(ecosystem, case.honest, tmp_path / "honest"), 0)
    assert played.result == "solved", played
