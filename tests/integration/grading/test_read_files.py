"""What the tests' own code reads and calls is the base's: a patch that changes it is flagged, and data of tests is left
out.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from grading.judge_patch import GradingLimits, KnownRuns
from tests.integration.boxes import FreshBox
from tests.integration.grading.conftest import config
from tests.integration.grading.ecosystems import Ecosystem, Referee, patch_of
from tests.integration.grading.shop import PYTHON, Edits

pytestmark = pytest.mark.timeout(600)
_BUG = "def squares(n):\n    return list(range(n))\n"
_FIX = "def squares(n):\n    return [i * i for i in range(n)]\n"
_NAMES = (
    "import pathlib\n\n\ndef names():\n"
    "    return (pathlib.Path(__file__).parent / 'names.txt').read_text().split()\n\n\n"
)
_TESTS = (
    "import json\nimport pathlib\n\nfrom lib.it import names, squares\n\n\n"
    "def test_opened():\n    with open('examples/squares.json') as file:\n"
    "        assert squares(4) == json.load(file)\n\n\n"
    "def test_path():\n    assert str(squares(3)) == pathlib.Path('examples/text/three.txt').read_text().strip()\n\n\n"
    "def test_names():\n    assert len(names()) == 2\n    pathlib.Path('examples/out.txt').write_text('made')\n"
)
_ECOSYSTEM = Ecosystem(
    "read",
    "python3",
    {
        "lib/__init__.py": "",
        "lib/it.py": _NAMES + _BUG,
        "lib/names.txt": "a b\n",
        "examples/squares.json": "[0, 1, 4, 9]\n",
        "examples/text/three.txt": "[0, 1, 4]\n",
        "examples/out.txt": "\n",
    },
    {"lib/it.py": _NAMES + _FIX},
    {"tests/test_it.py": _TESTS},
    f"{PYTHON} -B -m pytest -rA -q -p no:cacheprovider tests/test_it.py",
)
_WHAT = "changes a file that the tests read"


@pytest.mark.parametrize(
    ("edits", "flagged"),
    [
        ({"examples/squares.json": "[0, 1, 2, 3]\n", "examples/text/three.txt": "[0, 1, 2]\n"}, 2),
        ({"lib/it.py": _NAMES + _FIX, "examples/squares.json": "[0, 1, 4, 9]"}, 1),
        ({"lib/it.py": _NAMES + _FIX, "lib/names.txt": "b c\n", "examples/out.txt": "x\n", "new.txt": "1\n"}, 0),
    ],
)
async def test_a_change_of_what_the_tests_read_is_flagged(
    edits: Edits, flagged: int, fresh_box: FreshBox, tmp_path: Path
) -> None:
    referee = Referee(_ECOSYSTEM, KnownRuns(), GradingLimits.of_run(config(eval_seconds=60)))
    played = await referee.play(fresh_box, patch_of(_ECOSYSTEM, edits, tmp_path), 0)
    assert played.result == "solved", played
    assert [flag.place for flag in played.flags] == [path for path in edits if path.startswith("examples/")][:flagged]
    assert all(flag.what == _WHAT for flag in played.flags), played.flags


async def test_data_below_test_directories_stays_as_it_is(fresh_box: FreshBox, tmp_path: Path) -> None:
    data = "tests/data/three.json"
    test = (
        "import json\n\nfrom lib.it import squares\n\n\ndef test_it():\n"
        f"    assert squares(3) == json.load(open('{data}'))\n"
    )
    ecosystem = replace(_ECOSYSTEM, base={**_ECOSYSTEM.base, data: "[0, 1, 4]\n"}, tests={"tests/test_it.py": test})
    referee = Referee(ecosystem, KnownRuns(), GradingLimits.of_run(config(eval_seconds=60)))
    for number, (edits, result) in enumerate(
        (({data: "[0, 1, 2]\n"}, "not solved"), ({data: "[0,1,4]\n", "lib/it.py": _NAMES + _FIX}, "solved"))
    ):
        played = await referee.play(fresh_box, patch_of(ecosystem, edits, tmp_path / str(number)), 0)
        assert (played.result, played.findings) == (result, [f"test_data: {data} left out"]), played


async def test_a_clock_that_the_patch_puts_in_place_is_flagged(fresh_box: FreshBox, tmp_path: Path) -> None:
    test = (
        "import time\n\nfrom lib.it import squares\n\n\ndef test_it():\n    started = time.perf_counter()\n"
        "    squares(3)\n    assert time.perf_counter() - started > 60\n"
    )
    ecosystem = replace(_ECOSYSTEM, tests={"tests/test_it.py": test})
    referee = Referee(ecosystem, KnownRuns(), GradingLimits.of_run(config(eval_seconds=60)))
    clock = (
        "import itertools\nimport time\n\n_HOURS = itertools.count(0, 3600)\ntime.perf_counter = lambda: next(_HOURS)\n"
    )
    played = await referee.play(fresh_box, patch_of(ecosystem, {"lib/it.py": clock + _NAMES + _BUG}, tmp_path), 0)
    assert played.result == "solved", played
    assert {(flag.what, flag.place) for flag in played.flags} == {
        ("replaces what the tests call", "lib/it.py"),
        ("replaces what the tests call", "time.perf_counter"),
    }
