"""`ratchet admin bench --all` runs every benchmark of the checkout, and keeps the file of one that fails."""

from pathlib import Path

import pytest

from cli.main import run_app

BENCHMARKS = {
    "fast": """import json; print(json.dumps({"commit": "abc"}))""",
    "full": """import json, sys; print(json.dumps({"arguments": len(sys.argv) - 1}))""",
    "broken": """print("{"); raise SystemExit(3)""",
    "gpu": "raise SystemExit(9)",
    "gpu_loop": "raise SystemExit(9)",
    "_shared": "raise SystemExit(9)",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tests" / "benchmarks"
    folder.mkdir(parents=True)
    for name, code in BENCHMARKS.items():
        (folder / f"{name}.py").write_text(f'"""Measures {name}."""\n{code}\n')
    (tmp_path / "docs" / "bench").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return tmp_path


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["ratchet", "admin", "bench", *arguments])
    return run_app()


def test_all(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = checkout / "docs" / "bench"
    (results / "broken.json").write_text("earlier")
    assert bench(monkeypatch, "--all", "--full") == 1
    said = capsys.readouterr()
    assert said.out == "" and "these benchmarks failed and keep their earlier files: broken" in said.err
    found = {path.name: path.read_text().strip() for path in results.iterdir()}
    assert found == {"broken.json": "earlier", "fast.json": '{"commit": "abc"}', "full.json": '{"arguments": 1}'}


def test_all_takes_no_name(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(monkeypatch, "fast", "--all") == 2
    assert "leave 'fast' out" in capsys.readouterr().err
