"""`ratchet admin bench` lists and runs the benchmarks of the checkout."""

from pathlib import Path

import pytest

from cli.main import run_app

BENCHMARKS = {
    "fast": """import json; print(json.dumps({"commit": "abc"}))""",
    "full": """import json, sys; print(json.dumps({"arguments": len(sys.argv) - 1}))""",
    "broken": """print("{"); raise SystemExit(3)""",
    "_shared": "raise SystemExit(9)",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    for name, code in BENCHMARKS.items():
        (folder / f"{name}.py").write_text(f'"""Measures {name}."""\n{code}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return tmp_path


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["ratchet", "admin", "bench", *arguments])
    return run_app()


def test_one_is_run_with_its_arguments(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "full", "--full", "--", "--seed", "3") == 0
    assert capsys.readouterr().out.strip() == '{"arguments": 3}'
    assert bench(monkeypatch, "slow") == 2
    assert "available: broken, fast, full" in capsys.readouterr().err


def test_without_a_name_they_are_listed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [[name, "Measures", f"{name}."] for name in ("broken", "fast", "full")]
