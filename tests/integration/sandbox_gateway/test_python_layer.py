"""The interpreter and pytest that every box has."""

import os
import stat
from pathlib import Path

from ratchet import paths
from sandbox_gateway.python_layer import ensure_python_layer
from sandboxes.base import Sandbox


async def test_pytest_runs_in_a_box(box: Sandbox) -> None:
    await box.write_file(
        "/workspace/t/test_x.py",
        "import json, sqlite3, ssl\n\ndef test_ok():\n    assert 1\n\ndef test_bad():\n    assert 0\n",
    )
    result = await box.exec(
        "/opt/ratchet/bin/python3 -m pytest -p no:cacheprovider -q .", cwd="/workspace/t", user="agent", check=False
    )
    assert result.exit_code == 1 and "1 failed, 1 passed" in result.stdout
    assert (await box.exec("/opt/ratchet/bin/pytest --version")).stdout.startswith("pytest ")
    prefix = "/opt/ratchet/bin/python3 -c 'import sys, pytest; print(sys.prefix, pytest.__file__)'"
    assert all(part.startswith("/opt/ratchet") for part in (await box.exec(prefix)).stdout.split())


def test_a_built_layer_is_found_again(python_layer: Path) -> None:
    before = python_layer.stat().st_mtime_ns
    assert ensure_python_layer(paths.cache()) == python_layer
    assert python_layer.stat().st_mtime_ns == before
    assert not list(python_layer.parent.glob(".python-*"))


def test_every_user_of_a_box_reads_a_layer_that_a_careful_user_builds(python_layer: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        layer = ensure_python_layer(tmp_path)
    finally:
        os.umask(umask)
    hidden = [path for path in (layer, *layer.rglob("*")) if not path.stat().st_mode & stat.S_IROTH]
    assert layer.name == python_layer.name and hidden == []
