"""The group of version 2 in which a gateway makes those of its boxes."""

import errno
import os
from pathlib import Path

import pytest

from sandbox_gateway.boxd import cgroups

_OWN = "user.slice/user@1000.service/run.scope"


def say_delegated(mount: Path, answer: str) -> None:
    """Let a stand-in for systemctl say this of the group's unit."""
    program = mount.parent / "systemctl"
    program.write_text(f'#!/bin/sh\necho >>{mount.parent}/asked\n[ "$5" = run.scope ] && echo Delegate={answer}\n')
    program.chmod(0o755)
    cgroups._lacks_delegation.cache_clear()


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount that only shows its controllers, and a delegated group of this process below it."""
    mount = tmp_path / "cgroup"
    own = mount / _OWN
    own.mkdir(parents=True)
    for directory in (mount, own):
        (directory / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").touch()
    (own / "cgroup.procs").write_text("12\n34\n")
    (tmp_path / "own").write_text(f"1:name=other:/elsewhere\n0::/{_OWN}\n")
    monkeypatch.setattr(cgroups, "MOUNT", str(mount))
    monkeypatch.setattr(cgroups, "OWN", str(tmp_path / "own"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    say_delegated(mount, "yes")
    return mount


def make_group(directory: Path, *names: str) -> Path:
    """Make a group with these files, as the kernel does; it refuses to create others."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).touch()
    return directory


def test_groups_are_made_in_a_delegated_group(mount: Path) -> None:
    assert cgroups.usable_version() == 2
    assert cgroups.name_of("ours") == f"{_OWN}/ours"
    make_group(mount / _OWN / "ours", "cgroup.subtree_control")
    cgroups.prepare_parent(cgroups.name_of("ours"), moves_processes=True)
    assert (mount / _OWN / "ours/cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_gateway_that_is_started_in_the_leaf_of_an_earlier_one_finds_the_same_group(mount: Path) -> None:
    Path(cgroups.OWN).write_text(f"0::/{_OWN}/{cgroups._LEAF}\n")
    assert cgroups.name_of("ours") == f"{_OWN}/ours"


def test_the_whole_mount_comes_before_the_own_group(mount: Path) -> None:
    (mount / "cgroup.subtree_control").touch()
    (mount / "cgroup.procs").touch()
    assert cgroups.name_of("ours") == "ours"


@pytest.mark.parametrize("controllers", ("cpu memory", "pids", ""))
def test_a_group_without_the_controllers_is_of_no_use(mount: Path, controllers: str) -> None:
    (mount / _OWN / "cgroup.controllers").write_text(controllers)
    assert cgroups.usable_version() == 0
    assert not cgroups.cgroup_at("").directories


@pytest.mark.parametrize("answer", ("no", "not found", "never"))
def test_a_unit_of_systemd_is_of_use_only_if_it_is_delegated(
    mount: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    say_delegated(mount, answer)
    if answer == "not found":
        monkeypatch.setenv("PATH", str(mount))
    elif answer == "never":
        (mount.parent / "systemctl").write_text("#!/bin/sh\nexec sleep 60\n")
        monkeypatch.setattr(cgroups, "_SYSTEMCTL_SECONDS", 0.1)
    assert cgroups.usable_version() == 0 and cgroups.name_of("ours") == "ours"
    assert ("unit run.scope has no Delegate=yes" if answer == "no" else "not say whether") in cgroups.why_unusable()


def test_a_group_below_a_delegated_unit_is_of_use_and_systemd_is_asked_once(mount: Path) -> None:
    below = make_group(mount / _OWN / "a/b", "cgroup.subtree_control", "cgroup.procs")
    (below / "cgroup.controllers").write_text("memory pids\n")
    Path(cgroups.OWN).write_text(f"0::/{_OWN}/a/b\n")
    assert [cgroups.name_of("ours") for _ in range(3)] == [f"{_OWN}/a/b/ours"] * 3 and cgroups.usable_version() == 2
    assert (mount.parent / "asked").read_text() == "\n"


def test_a_group_of_no_unit_is_of_no_use(mount: Path) -> None:
    """A slice has no `Delegate=`, and the user's systemd does not know its own unit."""
    for name, text in (("subtree_control", ""), ("procs", ""), ("controllers", "memory pids")):
        (mount / f"user.slice/user@1000.service/cgroup.{name}").write_text(text)
    Path(cgroups.OWN).write_text("0::/user.slice/user@1000.service\n")
    assert cgroups.usable_version() == 0 and "no unit's" in cgroups.why_unusable()


def test_the_processes_of_the_group_move_only_if_they_may(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's refusal is played: this machine's group may be of version 1."""
    own, write = mount / _OWN, cgroups._write
    make_group(own / cgroups._LEAF, "cgroup.procs")
    make_group(own / "ours", "cgroup.subtree_control")

    def refuse(path: str, text: str) -> None:
        if path == f"{own}/cgroup.subtree_control" and not (own / cgroups._LEAF / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "Device or resource busy")
        write(path, text)

    monkeypatch.setattr(cgroups, "_write", refuse)
    with pytest.raises(OSError, match="busy"):
        cgroups.prepare_parent(cgroups.name_of("ours"), moves_processes=False)
    cgroups.prepare_parent(cgroups.name_of("ours"), moves_processes=True)
    assert (own / cgroups._LEAF / "cgroup.procs").read_text() == "34", "each is written by itself"
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"


@pytest.mark.parametrize("has_swap", (True, False))
def test_a_box_swaps_nothing(mount: Path, has_swap: bool) -> None:
    """The limit of memory is none while the kernel may swap what exceeds it; some kernels cannot limit that."""
    limits = {"memory.max": str(1 << 30), "pids.max": "100"} | ({"memory.swap.max": "0"} if has_swap else {})
    box = make_group(mount / _OWN / "ours/box", "cgroup.procs", *limits)
    cgroups.cgroup_at(f"{_OWN}/ours/box").create(1 << 30, 100)
    assert {name: (box / name).read_text() for name in limits} == limits
    assert (box / "memory.swap.max").exists() == has_swap
