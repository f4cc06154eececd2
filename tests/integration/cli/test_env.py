"""After `eval "$(ratchet admin env)"` a shell finds the Temporal CLI that `ratchet admin setup` has installed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def make_program(folder: Path, answer: str) -> Path:
    folder.mkdir(parents=True)
    program = folder / "temporal"
    program.write_text(f"#!/bin/sh\necho {answer}\n")
    program.chmod(0o755)
    return folder


def answer_of_temporal(tmp_path: Path, path: str) -> str:
    """Return the output of `temporal` in a shell that has evaluated the exports."""
    variables = {**os.environ, "RATCHET_HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path), "PATH": path}
    exports = subprocess.run(
        [sys.executable, "-m", "cli.main", "admin", "env"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return subprocess.run(
        ["/bin/sh", "-c", f"{exports}\ntemporal"], env=variables, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_installed_program_is_found(tmp_path: Path) -> None:
    make_program(tmp_path / "ratchet" / "bin", "cached")
    (tmp_path / "empty").mkdir()
    assert answer_of_temporal(tmp_path, str(tmp_path / "empty")) == "cached"


def test_a_program_on_path_keeps_its_precedence(tmp_path: Path) -> None:
    make_program(tmp_path / "ratchet" / "bin", "cached")
    own = make_program(tmp_path / "own", "own")
    assert answer_of_temporal(tmp_path, str(own)) == "own"
