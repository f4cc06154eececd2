"""The config and the host file that docs/fleet.md begins with are accepted, and every GPU has a part."""

import json
import re
from pathlib import Path

import pytest

from cli.main import run_app
from tests.standins.tiny_model import make_tokenizer, make_weights

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fleet.md"


def test_a_reader_can_type_the_first_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("\n## From a cluster")[2].partition("\n## ")[0]
    (config,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    (hosts,) = re.findall(r"printf '(.*?)' >hosts", section)
    metadata = {"image": "host", "workdir": "/w", "eval_cmd": "true"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "fix", "label": "a", "metadata": metadata}))
    make_tokenizer(tmp_path / "models" / "qwen3-4b")
    make_weights(tmp_path / "models" / "qwen3-4b")
    (tmp_path / "mine.yaml").write_text(config.replace("/shared/", f"{tmp_path}/"))
    (tmp_path / "hosts").write_text(hosts.replace("\\n", "\n"))
    values = {"MASTER_ADDR": "10.0.0.1", "RATCHET_DATABASE_URL": "postgresql://db.example.org/ratchet"}
    for name, value in (values | {"CUDA_VISIBLE_DEVICES": "", "RATCHET_HOME": str(tmp_path / "home")}).items():
        monkeypatch.setenv(name, value)
    words = ["launch", str(tmp_path / "hosts"), "--config", str(tmp_path / "mine.yaml"), "--check"]
    monkeypatch.setattr("sys.argv", ["ratchet", *words])
    assert run_app() == 0
    said = capsys.readouterr().out
    assert re.findall(r"^node (\S+) \(8 GPUs\)$", said, re.M) == ["10.0.0.2", "10.0.0.3"]
    assert len(re.findall(r"^  GPU \d   engine", said, re.M)) == len(re.findall(r"GPU \d   learner", said)) == 16
    assert "unused" not in said
