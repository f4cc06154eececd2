"""Planted bugs: only the edit changes, a recipe always gives the same bytes, and the gold patch undoes it."""

import ast
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.datasets.bug_planting import find_sites, plant_bug
from activities.datasets.package_recipes import gold_patch
from ratchet.errors import DatasetError

SOURCE = b'''\
"""Docs."""
LIMIT = 3


def first(values, key=None):  # a comment that stays: \xc3\xbc < >
    """x < y."""
    if len(values) < 1 and key is None:
        return None
    total = values[0] + (values[1]) * 2
    for one in values[1:]:
        total += one
        if one == 0:
            continue
    log(total, "end", flush=True)
    return max(total, len(values)) if key else f"{total + 1}"


class Box:
    size = 1

    async def grow(self, by):
        self.size = self.size - by
        return self.size not in (1, 2)
'''


def edit(operator: str, function: str = "first", index: int = 0) -> str:
    planted = plant_bug(SOURCE, operator, function, index).decode().splitlines()
    changed = [line.strip() for line, old in zip(planted, SOURCE.decode().splitlines(), strict=True) if line != old]
    assert len(changed) == 1
    return changed[0]


def test_each_operator() -> None:
    assert edit("compare") == "if len(values) <= 1 and key is None:"
    assert edit("compare", index=1) == "if len(values) < 1 and key is not None:"
    assert edit("boolean") == "if len(values) < 1 or key is None:"
    assert edit("negate") == "if not (len(values) < 1 and key is None):"
    assert edit("constant") == "if len(values) < 2 and key is None:"
    assert edit("arithmetic") == "total = values[0] - (values[1]) * 2"
    assert edit("arithmetic", index=1) == "total = values[0] + (values[1]) + 2"
    assert edit("slice") == "for one in values[:1]:"
    assert edit("lose_statement") == "pass"
    assert edit("loop_exit") == "break"
    assert edit("swap_arguments") == 'log("end", total, flush=True)'
    assert edit("drop_keyword") == 'log(total, "end")'
    assert edit("flag") == 'log(total, "end", flush=False)'
    assert edit("method") == 'return min(total, len(values)) if key else f"{total + 1}"'
    assert edit("compare", "Box.grow") == "return self.size in (1, 2)"


def test_docs_signatures_and_module_level_stay() -> None:
    lines = {site.line for site in find_sites(SOURCE)}
    assert lines.isdisjoint({1, 2, 5, 6, 19, 21})
    assert all(b"{total + 1}" in site.apply(SOURCE) for site in find_sites(SOURCE))


def test_a_site_that_is_not_there() -> None:
    with pytest.raises(DatasetError, match="no site slice 7 in first"):
        plant_bug(SOURCE, "slice", "first", 7)


STANDARD = [
    Path(sysconfig.get_path("stdlib")) / f"{name}.py"
    for name in ("textwrap", "argparse", "heapq", "configparser", "csv", "shlex")
]


@pytest.mark.parametrize("path", STANDARD, ids=lambda path: path.stem)
def test_every_site_of_real_code_is_another_program(path: Path) -> None:
    source = path.read_bytes()
    whole, found = ast.dump(ast.parse(source)), list(find_sites(source))
    assert len(found) > 20 and len({(site.operator, site.function, site.index) for site in found}) == len(found)
    for site in found[:: max(1, len(found) // 15)]:
        assert ast.dump(ast.parse(site.apply(source))) != whole, site
        assert plant_bug(source, site.operator, site.function, site.index) == site.apply(source)


_LINE = st.sampled_from(["a", "b = 1", "", "ü", "tab\t", "cr\r", "form\x0c", "x\u2028y"])


@settings(deadline=None, max_examples=40)
@given(st.lists(_LINE, min_size=1, max_size=12), st.integers(0, 11), st.booleans(), st.booleans())
def test_git_takes_the_bug_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], at: int, ends: bool, ended: bool
) -> None:
    """Any character that could end a line or the file."""
    original = "\n".join(lines) + ("\n" if ends else "")
    changed = [*lines]
    changed[at % len(lines)] += "!"
    broken = "\n".join(changed) + ("\n" if ended else "")
    directory = tmp_path_factory.mktemp("git")
    (directory / "f.py").write_bytes(broken.encode())
    patch = gold_patch("f.py", broken.encode(), original.encode())
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=directory, check=True, capture_output=True)
    assert (directory / "f.py").read_bytes() == original.encode()
