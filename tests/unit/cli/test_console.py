"""Tables of the command line, in a terminal of 80 columns and in a pipe."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from cli import console

RUN = "quickstart-261125-abcd"
REASON = "no attempt of 3 gave a patch: the sandbox service refused the box because its disk is full [28]"


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], str]:
    """Print one table to a terminal of 80 columns, or to a pipe; return its lines."""

    def run(is_terminal: bool) -> str:
        out = io.StringIO()
        made = Console(file=out, width=80, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(console, "Console", lambda: made)
        console.print_table("rollouts", ["id", "run", "reason"], [["123456", RUN, f"{REASON}\n\nmore"], ["7", RUN, ""]])
        return out.getvalue()

    return run


def test_terminal_rows_have_one_line_and_ids_are_whole(printed: Callable[[bool], str]) -> None:
    lines = [line.rstrip() for line in printed(True).splitlines()]
    assert len(lines) == 4 and all(len(line) <= 80 for line in lines)
    assert lines[2].startswith(f"123456  {RUN}  no attempt of 3") and lines[2].endswith("…")


def test_pipe_gets_everything(printed: Callable[[bool], str]) -> None:
    assert f"123456  {RUN}  {REASON} more" in printed(False)


def test_columns_before_the_last_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    made = Console(file=out, width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda: made)
    address = "http://127.0.0.1:20902/a/long/address/that/is/wider/than/the/terminal"
    console.print_table("parts", ["address", "state"], [[address, "answering"]])
    assert address in out.getvalue() and "\n".join(out.getvalue().splitlines()[2:]).count("\n") == 0
