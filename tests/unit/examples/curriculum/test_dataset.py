"""The curriculum's datasets: reproducible byte for byte; the check and the hidden test of a row tell the fix from the
bug in a real repository.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.curriculum.tasks import held_out_repositories, train_repositories
from tests.unit.examples.tiny_policy.test_dataset import check_rows, load_generator, prepare, run_in

DATASET = Path(__file__).resolve().parents[4] / "datasets" / "curriculum"
FILES = ("train_warm", "train_new", "heldout_warm", "heldout_new", "heldout_unseen")


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATASET / f"{name}.jsonl").read_text().splitlines()]


def test_the_generator_makes_the_committed_rows() -> None:
    readme = load_generator(DATASET).README
    tasks = {"train": train_repositories(), "heldout": held_out_repositories()}
    for name in FILES:
        part, _, kind = name.partition("_")
        lines = (DATASET / f"{name}.jsonl").read_text().splitlines()
        of_kind = [task for task in tasks[part] if task.kind == kind]
        check_rows(lines, of_kind, name.replace("_", "-"), readme, "check")


@pytest.mark.parametrize("name", FILES)
def test_a_row_tells_the_fix_from_the_bug(name: str, tmp_path: Path) -> None:
    row = read_rows(name)[3]
    repository = prepare(tmp_path, row)
    check = repository / "check"
    check.write_text(check.read_text().replace("/opt/ratchet/bin/python3", sys.executable))
    run_check = f"cd {repository} && ./check"
    assert run_in(tmp_path, run_check).stdout == "FAIL\n"
    assert run_in(tmp_path, row["metadata"]["eval_cmd"]).returncode == 1
    (tmp_path / "fix.patch").write_text(row["metadata"]["gold_patch"])
    assert run_in(tmp_path, f"cd {repository} && git apply {tmp_path}/fix.patch").returncode == 0
    assert run_in(tmp_path, run_check).stdout == "OK\n"
    assert run_in(tmp_path, row["metadata"]["eval_cmd"]).returncode == 0
