"""Which Temporal a stack runs: the setting, the record of the last `up`, a file of an earlier version, the default."""

import shutil
from pathlib import Path

import pytest

from ratchet.errors import ConfigError, MachineError
from stack import temporal_build, temporal_server
from stack.parts import Stack
from stack.temporal_server import SETTING, TemporalKind, settle_temporal_kind, temporal_kind


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SETTING, "TEMPORAL_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def cli_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Temporal's CLI, without Go and without a program in the cache."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "temporal").write_text("#!/bin/sh\n")
    (folder / "temporal").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(temporal_build, "_GO_PLACES", ())
    return folder


@pytest.fixture
def server_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the built server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = temporal_build.server_program()
    program.parent.mkdir(parents=True)
    program.write_text("")
    return program


def commands(home: Path) -> dict[str, list[str]]:
    return {part.name: part.command[4:] for part in Stack(home).parts()}


def test_a_new_stack_runs_the_server_with_its_ui(tmp_path: Path, server_there: Path) -> None:
    home = tmp_path / "home"
    assert settle_temporal_kind(home, print) is TemporalKind.SERVER
    assert commands(home)["temporal"] == ["temporal"] and commands(home)["temporal-ui"] == ["temporal-ui"]


def test_a_stack_of_an_earlier_version_keeps_its_dev_server(tmp_path: Path, cli_only: Path, server_there: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "temporal.db").write_text("histories")
    assert settle_temporal_kind(home, print) is TemporalKind.DEV
    assert commands(home)["temporal"] == ["temporal", "--dev"] and "temporal-ui" not in commands(home)
    assert (home / "temporal.db").read_text() == "histories"


def test_the_setting_decides_and_is_remembered(
    tmp_path: Path, cli_only: Path, server_there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, with the file of the other kind in place: the next `up` without the setting keeps the decision."""
    for wanted in (TemporalKind.DEV, TemporalKind.SERVER):
        monkeypatch.setenv(SETTING, wanted)
        assert settle_temporal_kind(tmp_path, print) is wanted
        (tmp_path / "temporal.db").write_text("")
        monkeypatch.delenv(SETTING)
        assert temporal_kind(tmp_path) is wanted
        assert settle_temporal_kind(tmp_path, print) is wanted


def test_an_unknown_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "sqlite")
    with pytest.raises(ConfigError, match="RATCHET_TEMPORAL=sqlite: expected server or dev"):
        temporal_kind(tmp_path)


def test_without_go_a_new_stack_says_so_and_runs_the_dev_server(tmp_path: Path, cli_only: Path) -> None:
    said: list[str] = []
    assert settle_temporal_kind(tmp_path / "home", said.append) is TemporalKind.DEV
    assert said == [
        "Temporal's server cannot be built, because Go is not installed: Temporal's dev server is used instead"
    ]
    assert temporal_kind(tmp_path / "home") is TemporalKind.DEV


def test_without_go_histories_on_postgres_are_not_left_behind(tmp_path: Path, cli_only: Path) -> None:
    """The program is lost with the cache: another server would begin without the stack's histories."""
    temporal_server._record(tmp_path).write_text("server\n")
    with pytest.raises(MachineError, match="Go is not installed; install Go, or set RATCHET_TEMPORAL=dev"):
        settle_temporal_kind(tmp_path, print)
    assert temporal_kind(tmp_path) is TemporalKind.SERVER


def test_an_address_of_the_user_means_that_no_part_of_temporal_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.example:7233")
    assert not {"temporal", "temporal-ui"} & set(commands(tmp_path))


def test_a_change_of_the_sources_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = temporal_build.server_program()
    shutil.copytree(temporal_build.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(temporal_build, "SOURCES", tmp_path / "sources")
    assert temporal_build.server_program() == before
    (tmp_path / "sources" / "go.sum").write_text("")
    assert temporal_build.server_program() != before


def test_a_build_that_fails_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A go.mod that the installed Go is too old for."""
    if temporal_build.find_go() is None:
        pytest.skip("Go is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GOTOOLCHAIN", "local")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "go.mod").write_text("module example\n\ngo 1.99\n")
    monkeypatch.setattr(temporal_build, "SOURCES", sources)
    with pytest.raises(MachineError, match=r"cannot be built: .*1\.99"):
        temporal_build.ensure_server_program(print)
    assert not list((tmp_path / "cache" / "ratchet" / "bin").glob("temporal-server*"))
