"""Every process of ours starts with huge pages for malloc; what the user has set is kept, and his word on them wins."""

import os
import subprocess

import pytest

from ratchet.start_variables import start_variables, uses_huge_pages

OURS = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, OURS),
        ("", OURS),
        (":", OURS),
        ("glibc.malloc.arena_max=2", f"glibc.malloc.arena_max=2:{OURS}"),
        ("glibc.malloc.arena_max=2:", f"glibc.malloc.arena_max=2:{OURS}"),
        ("glibc.malloc.hugetlb_else=2", f"glibc.malloc.hugetlb_else=2:{OURS}"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=2", "glibc.malloc.hugetlb=2:glibc.malloc.arena_max=2"),
        (OURS, OURS),
    ],
)
def test_the_users_tunables_are_extended_once(found: str | None, expected: str) -> None:
    environment = {} if found is None else {"GLIBC_TUNABLES": found}
    started = environment | start_variables(environment, "glibc 2.36")
    assert started["GLIBC_TUNABLES"] == expected
    assert started | start_variables(started, "glibc 2.36") == started, "a process that such a process starts"
    assert uses_huge_pages(started, "glibc 2.36") == ("hugetlb=0" not in expected)


def test_the_users_wait_policy_wins() -> None:
    assert start_variables({})["OMP_WAIT_POLICY"] == "PASSIVE"
    assert start_variables({"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("version", ["glibc 2.34", "glibc 2.9", "", None, "musl 1.2"])
def test_a_c_library_without_the_tunable_gets_none(version: str | None) -> None:
    assert "GLIBC_TUNABLES" not in start_variables({}, version)
    assert start_variables({"GLIBC_TUNABLES": OURS}, version).get("GLIBC_TUNABLES", OURS) == OURS
    assert not uses_huge_pages({"GLIBC_TUNABLES": OURS}, version)


@pytest.mark.parametrize("version", ["glibc 2.35", "glibc 2.41", "glibc 3.0", "glibc 2.35.9000"])
def test_a_newer_one_gets_it(version: str) -> None:
    assert start_variables({}, version)["GLIBC_TUNABLES"] == OURS


def test_the_c_library_of_this_machine_takes_it_as_we_write_it() -> None:
    """ld.so prints the tunables that it has read."""
    loader = subprocess.run(
        ["sh", "-c", "ls /lib64/ld-linux-x86-64.so.2 /lib/ld-linux-aarch64.so.1 2>/dev/null | head -1"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not loader or "GLIBC_TUNABLES" not in start_variables({}):
        pytest.skip("this machine's C library has no such tunable")
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.arena_max=2:"}
    environment |= start_variables(environment)
    listed = subprocess.run(
        [loader, "--list-tunables"], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "glibc.malloc.hugetlb: 0x1" in listed
    assert "glibc.malloc.arena_max: 0x2" in listed
