"""The kind of Temporal that a stack runs: by the setting, the record of the last `up`, the default."""

import shutil
import subprocess
import sys
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
    return {part.name: part.command[5:] for part in Stack(home).parts()}


def test_a_new_stack_runs_the_server_with_its_ui(tmp_path: Path, server_there: Path) -> None:
    home = tmp_path / "home"
    assert settle_temporal_kind(home, print) is TemporalKind.SERVER
    assert commands(home)["temporal"] == ["temporal"] and commands(home)["temporal-ui"] == ["temporal-ui"]


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


# ---------------------------------------------------------------- the build before the Python environment is there

ROOT = Path(__file__).parents[3]

ENVIRONMENT_FAILS = "bash -c 'until [ -e {started} ]; do sleep 0.05; done; exit 7'"
"""Stands for the making of the environment: it fails once the build has begun."""


@pytest.fixture
def early(tmp_path: Path) -> dict[str, str]:
    """The variables of a machine with an empty cache and without Go."""
    folder = tmp_path / "early"
    folder.mkdir()
    return {"PATH": f"{folder}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache"), "RATCHET_HOME": str(tmp_path)}


def stand_in_for_go(early: dict[str, str], build: str) -> None:
    """Put a program `go` on PATH that lists four packages and builds with the lines `build`; $program is its target."""
    program = Path(early["PATH"].split(":")[0]) / "go"
    script = f"#!/bin/bash\n[ $1 = list ] && echo a b c d && exit\nprogram=${{@: -2:1}}\n{build}\n"
    program.write_text(script)
    program.chmod(0o755)


def build_early(early: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run the early build as `make setup` does, with an interpreter that sees the standard library only."""
    command = [sys.executable, "-S", "-m", "stack.temporal_server"]
    return subprocess.run(command, cwd=ROOT, env=early, capture_output=True, text=True, check=False, timeout=100)


def in_cache(early: dict[str, str]) -> list[Path]:
    return sorted((Path(early["XDG_CACHE_HOME"]) / "ratchet" / "bin").glob("*"))


def test_the_standard_library_is_enough_to_build(early: dict[str, str]) -> None:
    stand_in_for_go(early, "echo built > $program")
    done = build_early(early)
    assert done.returncode == 0 and "temporal: built in" in done.stderr
    (program,) = in_cache(early)
    assert program.name == temporal_build.server_program().name and program.read_text() == "built\n"


@pytest.mark.parametrize(("variable", "value"), [("TEMPORAL_ADDRESS", "temporal.example:7233"), (SETTING, "dev")])
def test_a_stack_that_will_not_run_the_server_builds_nothing(early: dict[str, str], variable: str, value: str) -> None:
    """Not a word, because `ratchet admin setup` says what it does."""
    stand_in_for_go(early, "exit 1")
    done = build_early(early | {variable: value})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert in_cache(early) == []


def test_a_stack_that_records_the_dev_server_builds_nothing(early: dict[str, str]) -> None:
    stand_in_for_go(early, "exit 1")
    (Path(early["RATCHET_HOME"]) / "temporal.kind").write_text("dev\n")
    assert (build_early(early).returncode, in_cache(early)) == (0, [])


def test_without_go_nothing_is_built_early(cli_only: Path, capfd: pytest.CaptureFixture[str]) -> None:
    temporal_server.build_early()
    assert capfd.readouterr() == ("", "") and not (cli_only.parent / "cache").exists()


def test_an_early_build_that_fails_says_why_and_leaves_nothing(early: dict[str, str]) -> None:
    stand_in_for_go(early, "touch $program $GOTMPDIR/half; echo no space left on device >&2; exit 1")
    done = build_early(early)
    assert done.returncode == 1
    assert done.stderr.endswith("temporal: Temporal's server cannot be built: no space left on device\n")
    assert in_cache(early) == []


def test_an_environment_that_fails_ends_the_build(tmp_path: Path, early: dict[str, str]) -> None:
    """`make setup` ends with nothing left running and nothing half made; the next one begins anew."""
    started = tmp_path / "started"
    stand_in_for_go(
        early, f"touch $GOTMPDIR/half; echo $$ > {started}.new; mv {started}.new {started}; exec sleep 1000"
    )
    environment = ENVIRONMENT_FAILS.format(started=started)
    command = ["make", "setup", f"PYTHON={sys.executable}", f"ENVIRONMENT={environment}"]
    done = subprocess.run(command, cwd=ROOT, env=early, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2 and "Error 7" in done.stderr
    assert not Path(f"/proc/{started.read_text().strip()}").exists()
    assert in_cache(early) == []


def test_the_rest_of_the_build_is_told_from_its_rate(
    tmp_path: Path, early: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    stand_in_for_go(early, f"echo a >&2; echo b >&2; until [ -e {told} ]; do sleep 0.05; done; touch $program")
    for name, value in early.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(temporal_build, "_REPORT_SECONDS", 0.0)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("compiled 2 of"):
            told.touch()

    temporal_build.ensure_server_program(say)
    assert "compiled 2 of 4 packages, less than a minute more" in said


# ---------------------------------------------------------------- the build itself


def test_a_change_of_the_sources_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = temporal_build.server_program()
    shutil.copytree(temporal_build.SOURCES, tmp_path / "sources")
    monkeypatch.setattr(temporal_build, "SOURCES", tmp_path / "sources")
    assert temporal_build.server_program() == before
    (tmp_path / "sources" / "without" / "sqlite" / "go.mod").write_text("")
    changed = temporal_build.server_program()
    (tmp_path / "sources" / "go.sum").write_text("")
    assert len({before, changed, temporal_build.server_program()}) == 3


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
