"""Requests that contradict themselves are refused before anything is asked."""

from pathlib import Path

import pytest

from cli.main import run_app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stop", "RUN", "--drain", "--now"], "use one of them"),
        (["stop", "17", "--drain"], "'17' is cancelled at once"),
        (["stop", "group/RUN/3", "--now"], "--drain and --now are for runs"),
        (["set", "RUN"], "name what to change of RUN"),
        (["set", "RUN", "training.steps"], "training.steps"),
    ],
)
def test_it_is_refused_with_the_remedy(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["ratchet", *arguments])
    assert run_app() == 2
    assert words in " ".join(capsys.readouterr().err.split())
