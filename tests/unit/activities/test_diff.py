"""A patch counts only if all of it has arrived."""

import base64
import hashlib

import pytest

from activities.diff import parse_diff
from ratchet.errors import SandboxBusyError

PATCH = b"diff --git a/x.py b/x.py\n" + b"+line\n" * 50


def printed(body: bytes = PATCH, num_files: int = 1, of: bytes = PATCH) -> str:
    """Return the script's output for the diff `of`, if `body` arrives."""
    return f"{num_files} {len(of)} {hashlib.sha256(of).hexdigest()}\n{base64.b64encode(body).decode()}\n"


def test_a_whole_diff() -> None:
    captured = parse_diff(printed(), 1000)
    assert (captured.diff, captured.num_files, captured.reason) == (PATCH, 1, "")
    assert parse_diff(printed(b"", 0, b""), 1000).diff == b""


def test_a_diff_that_is_cut_anywhere_is_no_diff() -> None:
    """A cut after the first line was an empty patch, and a cut within the second a shorter patch."""
    whole = printed()
    for length in range(len(whole)):
        with pytest.raises(SandboxBusyError, match="not arrived whole"):
            parse_diff(whole[:length], 1000)


@pytest.mark.parametrize(
    "wrong", [printed(PATCH[:-1]), printed(PATCH[:-1] + b"x"), printed(b"", 1, b""), printed().replace("=\n", "\n")]
)
def test_a_diff_that_is_not_what_the_box_has_measured_is_no_diff(wrong: str) -> None:
    with pytest.raises(SandboxBusyError, match="not arrived whole"):
        parse_diff(wrong, 1000)


def test_a_diff_above_the_limit_says_its_size() -> None:
    captured = parse_diff(f"3 5000 {hashlib.sha256(PATCH).hexdigest()}\ntoo_large\n", 1000)
    assert captured.diff == b"" and captured.reason.startswith("the diff of 5000 bytes is above")
