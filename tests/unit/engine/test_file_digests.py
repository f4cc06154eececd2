"""Digests that are computed before a pause: a file that was changed since is read again, and a wrong one is told."""

import os
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest

from engine import file_digests
from engine.file_digests import BackgroundChecks, FileDigests
from engine.policy_files import file_sha256, sha256_of

OLD = 10**18
"""A time long ago, in nanoseconds, as files of a copy or of an image may have it."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read, in order. The clock's tick is over for all files."""
    names: list[str] = []

    def note(file: FileIO) -> str:
        names.append(Path(str(file.name)).name)
        return sha256_of(file)

    monkeypatch.setattr(file_digests, "sha256_of", note)
    monkeypatch.setattr(file_digests, "_TICK_NS", 0)
    return names


def test_a_file_is_read_once(tmp_path: Path, read: list[str]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")
    digests = FileDigests()
    assert digests.get(path) == digests.get(path) == file_sha256(path)
    assert read == ["a"]


def test_a_file_that_was_just_written_is_read_again(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change in the same tick of the file's clock would leave no trace."""
    monkeypatch.setattr(file_digests, "_TICK_NS", 10**18)
    path = tmp_path / "a"
    path.write_bytes(b"one")
    digests = FileDigests()
    assert digests.get(path) == digests.get(path)
    assert read == ["a", "a"]


def test_an_old_digest_is_computed_again_and_forgotten(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "DIGEST_KEPT_SECONDS", -1.0)
    digests = FileDigests()
    for name in ("a", "a", "b"):
        (tmp_path / name).write_bytes(b"one")
        digests.get(tmp_path / name)
    assert read == ["a", "a", "b"]
    assert len(digests._kept) == 1


@pytest.mark.parametrize("way", ["rewritten", "replaced", "touched back", "link moved"])
def test_a_changed_file_is_read_again(tmp_path: Path, read: list[str], way: str) -> None:
    """Also one of the same size whose modification time was set back."""
    path = tmp_path / "a"
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "target").write_bytes(b"one")
    if way == "link moved":
        path.symlink_to(tmp_path / "target")
    else:
        path.write_bytes(b"one")
    os.utime(path, ns=(OLD, OLD))
    digests = FileDigests()
    before = digests.get(path)
    if way == "replaced":
        os.replace(tmp_path / "b", path)
    elif way == "link moved":
        path.unlink()
        path.symlink_to(tmp_path / "b")
    else:
        path.write_bytes(b"two")
    if way == "touched back":
        os.utime(path, ns=(OLD, OLD))
    assert digests.get(path) == file_sha256(path) != before


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one")

    def read_and_change(file: FileIO) -> str:
        digest = sha256_of(file)
        path.write_bytes(b"longer")
        return digest

    monkeypatch.setattr(file_digests, "_TICK_NS", 0)
    monkeypatch.setattr(file_digests, "sha256_of", read_and_change)
    digests = FileDigests()
    digests.get(path)
    monkeypatch.setattr(file_digests, "sha256_of", sha256_of)
    assert digests.get(path) == file_sha256(path)


def test_a_known_digest_waits_for_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update must not wait, while vLLM is paused, for what a thread reads for another run."""
    go_on, begun = threading.Event(), threading.Event()

    def read_slowly(file: FileIO) -> str:
        if str(file.name).endswith("slow"):
            begun.set()
            assert go_on.wait(60)
        return sha256_of(file)

    monkeypatch.setattr(file_digests, "_TICK_NS", 0)
    monkeypatch.setattr(file_digests, "sha256_of", read_slowly)
    for name in ("known", "new", "slow"):
        (tmp_path / name).write_bytes(b"x")
    digests = FileDigests()
    digests.get(tmp_path / "known")
    thread = threading.Thread(target=digests.get, args=(tmp_path / "slow",))
    thread.start()
    assert begun.wait(60)
    digests.get(tmp_path / "known")
    digests.get(tmp_path / "new")
    go_on.set()
    thread.join(60)


def ended(checks: BackgroundChecks, name: str, work: Callable[[], object]) -> dict[str, object]:
    while not (found := checks.ask(name, work))["done"]:
        time.sleep(0.001)
    return found


def test_a_check_goes_on_until_it_has_ended_and_is_told_again() -> None:
    """Again, since the caller asks all workers until all have ended."""
    go_on, calls = threading.Event(), []

    def work() -> None:
        calls.append(1)
        go_on.wait(60)

    checks = BackgroundChecks()
    for _ in range(3):
        assert checks.ask("a", work) == {"done": False, "error": None}
    go_on.set()
    for _ in range(3):
        assert ended(checks, "a", work) == {"done": True, "error": None}
    assert calls == [1]


def test_what_a_check_raises_is_told_and_another_check_begins_anew() -> None:
    def fail() -> None:
        raise ValueError("a has sha256 0, expected 1")

    checks = BackgroundChecks()
    assert ended(checks, "a", fail) == {"done": True, "error": "a has sha256 0, expected 1"}
    assert ended(checks, "b", lambda: None) == {"done": True, "error": None}


def test_two_callers_are_told_of_their_own_files() -> None:
    """Two runs share an engine: their threads read one after the other, so that neither disk nor threads pile up."""
    go_on, calls = threading.Event(), []

    def fail() -> None:
        calls.append("a")
        go_on.wait(60)
        raise ValueError("late")

    checks = BackgroundChecks()
    for _ in range(3):
        assert checks.ask("a", fail) == checks.ask("b", lambda: calls.append("b")) == {"done": False, "error": None}
    go_on.set()
    assert ended(checks, "b", lambda: None) == {"done": True, "error": None}
    assert ended(checks, "a", fail) == {"done": True, "error": "late"}
    assert calls == ["a", "b"]


def test_an_ended_check_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "ENDED_KEPT_SECONDS", -1.0)
    checks = BackgroundChecks()
    for number in range(20):
        checks.ask(str(number), lambda: None)
        for one in list(checks._checks.values()):
            one.thread.join(60)
    assert len(checks._checks) == 1
