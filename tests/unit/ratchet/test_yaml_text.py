"""Files that a person has written: what is wrong with them is one sentence that names file and remedy."""

from pathlib import Path

import pytest

from activities.datasets.base import Problem
from activities.datasets.harbor import read_harbor
from ratchet import secrets
from ratchet.config import DatasetConfig
from ratchet.config_sources import dotted_values, load_config
from ratchet.errors import ConfigError
from ratchet.temporal_settings import load_temporal_settings, positive_number
from ratchet.yaml_text import parse_yaml
from stack.cluster import read_cluster

BAD = {
    "utf-16": ("seed: 1\n".encode("utf-16"), r"is not UTF-8 \(byte 1 is 0xff\); save it as UTF-8"),
    "latin-1": ("model: caf\xe9\n".encode("latin-1"), r"is not UTF-8 \(byte 11 is 0xe9\)"),
    "deep": (b"model: " + b"[" * 100_000, "nested too deeply"),
    "huge": (b"seed: " + b"9" * 5000 + b"\n", "an integer has too many digits"),
    "date": (b"seed: 2024-13-45\n", "is not YAML"),
    "twice": (b"seed: 1\nloss:\n  clip: 1\nseed: 2\n", "key 'seed' is given twice, in lines 1 and 4"),
    "tag": (b"seed: !!python/object:os.system x\n", "is not YAML"),
    "tab": (b"loss:\n\tclip: 1\n", "is not YAML"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD.keys())
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a file.yaml"
    path.write_bytes(content)
    for read in (load_config, load_temporal_settings, read_cluster):
        with pytest.raises(ConfigError, match=f"a file.yaml: .*{words}"):
            read(path)


def test_a_mark_and_other_line_ends_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfdatasets:\r\n  - path: tasks.jsonl\r\nseed: 7\r\n")
    assert load_config(path, environment={}).seed == 7


def test_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    path = tmp_path / "run.yaml"
    path.write_text("datasets:\n  - &one {path: tasks.jsonl, use: eval}\n  - {<<: *one, use: train}\n")
    assert [one.use for one in load_config(path, environment={}).datasets] == ["eval", "train"]


def test_an_alias_of_a_mapping_with_merged_keys_gives_no_key_twice() -> None:
    text = "a: &a {x: 1, y: 1}\nb:\n  one: &one\n    <<: *a\n    x: 2\nc:\n  <<: *one\n"
    assert parse_yaml(text)["c"] == {"x": 2, "y": 1}
    assert parse_yaml("a: &a [*a]\n")["a"][0] is not None, "an alias may contain itself"


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, "2024-13-45", "a: 1\na: 2"], ids=range(4))
def test_a_value_that_is_no_yaml_is_text(text: str) -> None:
    assert dotted_values([f"prompt={text}"]) == {"prompt": text}


@pytest.mark.parametrize("text", ["9" * 5000, "99999999999", "-1", "0", " 3", "１", "1_0"])
def test_a_number_of_a_variable_is_bounded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SWE_BOOT_CONCURRENCY", text)
    with pytest.raises(ConfigError, match=r"SWE_BOOT_CONCURRENCY: .* is not a positive number up to 2147483647"):
        positive_number("SWE_BOOT_CONCURRENCY", 1)


def test_secrets_in_another_encoding_are_bytes_as_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    (tmp_path / "secrets.env").write_bytes(b"\xef\xbb\xbfFIRST=one\nSECOND=caf\xe9\n")
    assert secrets._from_file() == {"FIRST": "one", "SECOND": "caf\udce9"}


@pytest.mark.parametrize("name", ["instruction.md", "task.toml"])
def test_a_task_in_another_encoding_is_a_problem_of_its_row(tmp_path: Path, name: str) -> None:
    for number, task in enumerate((tmp_path / "a", tmp_path / "b")):
        for part in ("tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "tests" / "test.sh").write_text("true\n")
        (task / "solution" / "solve.sh").write_text("true\n")
        (task / "instruction.md").write_text("do it\n")
        (task / "task.toml").write_text('[environment]\ndocker_image = "x"\n')
        if number == 0:
            (task / name).write_bytes(b"\xff\xfe caf\xe9\n")
    found = list(read_harbor(tmp_path, DatasetConfig(path=str(tmp_path))))
    assert [isinstance(one, Problem) for one in found] == [True, False]
    assert "UTF-8" in str(found[0])


def test_a_table_that_is_none_is_a_problem_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "instruction.md").write_text("do it\n")
    (tmp_path / "task.toml").write_text('environment = "x"\n')
    (found,) = read_harbor(tmp_path, DatasetConfig(path=str(tmp_path)))
    assert "expected a table, found str" in str(found)
