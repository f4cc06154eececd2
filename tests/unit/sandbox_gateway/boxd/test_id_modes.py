"""The ranges of ids that a file gives to a user, and the table of modes."""

import pwd
from pathlib import Path

import pytest

from sandbox_gateway.boxd import id_modes


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        ("", None),
        ("daemon:100000:65536\n", "100000"),
        ("other:100000:65536\n1:200000:65536\n", "200000"),
        ("daemon:100000:1000\ndaemon:300000:70000\n", "300000"),
        ("daemon:100000:65535\nnonsense\ndaemon:1\ndaemon:x:y\n\n", None),
        ("daemons:100000:65536\n", None),
    ],
)
def test_the_first_range_of_a_user_that_is_long_enough(lines: str, first: str | None, tmp_path: Path) -> None:
    assert pwd.getpwuid(1).pw_name == "daemon"
    file = tmp_path / "subuid"
    file.write_text(lines)
    assert id_modes._first_subordinate_id(str(file), 1) == first


def test_a_user_without_an_entry_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    assert id_modes._first_subordinate_id(str(file), 1) is None
    file.write_text("4000000:100000:65536\n")
    assert id_modes._first_subordinate_id(str(file), 4_000_000) == "100000"


def test_every_mode_but_root_names_what_it_lacks() -> None:
    assert not id_modes.ROOT.lacks and id_modes.ROOT.words == "root"
    for mode in (id_modes.SUBORDINATE_IDS, id_modes.ONE_ID):
        assert mode.words.startswith(mode.name) and all(lack in mode.words for lack in mode.lacks)
