"""A file of the base that the tests' own code reads may hold what they expect: a patch that changes it is flagged."""

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
