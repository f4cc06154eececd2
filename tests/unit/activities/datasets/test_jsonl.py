"""Dataset rows: every mistake is named by file, row and field before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from activities.datasets.formats import read_rows
from ratchet.config import DatasetConfig
from ratchet.errors import DatasetError

GOOD: dict[str, Any] = {
    "prompt": "fix it",
    "label": "a",
    "metadata": {"image": "host", "workdir": "/w", "eval_cmd": "true"},
}


def write(path: Path, *rows: Any) -> DatasetConfig:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return DatasetConfig(path=str(path))


def changed(**metadata: Any) -> dict[str, Any]:
    merged = {**GOOD["metadata"], **metadata}
    return {**GOOD, "metadata": {key: value for key, value in merged.items() if value != "REMOVED"}}


def test_a_good_row(tmp_path: Path) -> None:
    rows = list(
        read_rows(write(tmp_path / "d.jsonl", GOOD, changed(problem_statement="other", pre_commands="ls")), "digest")
    )
    assert rows[0]["spec"]["problem_statement"] == "fix it"
    assert (rows[1]["spec"]["problem_statement"], rows[1]["spec"]["pre_commands"]) == ("other", ["ls"])
    spaced = list(
        read_rows(write(tmp_path / "spaced.jsonl", "\n", GOOD, " \n", changed(problem_statement="other")), "d")
    )
    assert [row["row_no"] for row in spaced] == [0, 1], "an empty line is no row"
    assert rows[0]["grader"] == "eval_cmd" and rows[0]["row_digest"] != rows[1]["row_digest"]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("not json\n", "row 2: is not JSON"),
        ("[1]\n", "row 2: expected an object, found list"),
        ({**GOOD, "label": 7}, "row 2, field label: expected a string, found 7"),
        ({**GOOD, "metadata": None}, "row 2, field metadata: expected an object, found NoneType"),
        (changed(image="REMOVED"), "row 2, field metadata.image: expected a value, found nothing"),
        (changed(workdir="relative"), "row 2, field metadata.workdir: expected an absolute path, found 'relative'"),
        (
            changed(empty_patch_fails="no"),
            "row 2, field metadata.empty_patch_fails: expected true or false, found 'no'",
        ),
        (changed(agent_user="root"), "field metadata.agent_user: expected the name of a user other than root"),
        (changed(agent_user="a b; reboot"), "field metadata.agent_user: expected the name of a user other than root"),
        (
            changed(network=["grading"]),
            "row 2, field metadata.network.0: expected Input should be 'agent', 'grade' or 'pre_commands'",
        ),
        (
            changed(eval_cmd="REMOVED"),
            "field metadata: expected exactly one grader of: swepro, swe_bench, eval_cmd, f2p_script, found none",
        ),
        (changed(eval_cmd="REMOVED", eval_cmdd="true"), "found none; `eval_cmdd` may be meant as `eval_cmd`"),
        (
            changed(broken_oracles=[{"edits": [], "digests": {}}]),
            "row 2, field metadata: broken_oracles.0 names no test that must fail (must_fail or exit_fails)",
        ),
        (
            changed(broken_oracles=[{"edits": [], "digests": {"spec:eval_cmd": "00"}, "exit_fails": True}]),
            "row 2, field metadata: broken_oracles.0 was made for other test commands than this row's",
        ),
        (
            {**GOOD, "prompt": None},
            "row 2, field prompt: expected a string where metadata.problem_statement is missing",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: Any, named: str) -> None:
    dataset = write(tmp_path / "d.jsonl", GOOD, row)
    with pytest.raises(DatasetError) as error:
        list(read_rows(dataset, "digest"))
    assert "d.jsonl, row 2" in str(error.value) and named in str(error.value)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d.jsonl", GOOD, "broken\n").model_copy(update={"limit": 1})
    assert len(list(read_rows(dataset, "digest"))) == 1
