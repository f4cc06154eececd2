"""Importing a user's own module: every failure is an ImportError, which each caller rewords."""

import sys
from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from ratchet.import_path import import_object


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def loss(:", "SyntaxError: "),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("pass", "has no attribute 'loss'"),
    ],
)
def test_a_module_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str) -> None:
    from grading.rewards import find_reward

    (tmp_path / "users_own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=named):
        import_object("users_own:loss")
    with pytest.raises(ConfigError, match=named):
        find_reward("users_own:loss")


def test_the_working_directory_is_the_last_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "in_working_directory.py").write_text("def loss(): ...")
    (tmp_path / "training.py").write_text("raise RuntimeError('hides our package')")
    assert import_object("in_working_directory:loss").__module__ == "in_working_directory"
    assert import_object("training.loss:TokenBatch").__module__ == "training.loss"
    assert sys.path[-1] == str(tmp_path)
