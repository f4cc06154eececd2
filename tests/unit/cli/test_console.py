"""Tables of the command line, in a terminal of 80 columns and in a pipe."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from cli import console
from ratchet.progress import CountedLine

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


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, columns: list[str], rows: list[list[str]], breaks_last: bool = False
) -> list[str]:
    out = io.StringIO()
    made = Console(file=out, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "Console", lambda: made)
    console.print_table("title", columns, rows, breaks_last=breaks_last)
    return [line.rstrip() for line in out.getvalue().splitlines()[1:]]


def test_columns_before_the_last_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://127.0.0.1:20902/a/long/address/that/is/wider/than/the/terminal"
    lines = on_terminal(monkeypatch, 40, ["address", "state"], [[address, "answering"]])
    assert lines == ["address", address, "    state answering"]


def test_the_last_column_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["disk", "39 GiB free at a place"], ["ports", ""]]
    lines = on_terminal(monkeypatch, 24, ["what", "detail"], rows, breaks_last=True)
    assert lines == ["what   detail", "disk   39 GiB free at a", "       place", "ports"]


def test_titles_break_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, 24, ["step", "rollouts with a verdict", "mean"], [["7", "88", "0.125"]])
    assert lines == ["step  rollouts  mean", "      with a", "      verdict", "7     88        0.125"]


def test_columns_that_do_not_fit_follow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ["when", "who", "what", "from", "to", "why"]
    row = ["2026-11-25 17:00:00", "anna", "set training.learning_rate", "0.00025", "0.0001", "the loss rises [1]"]
    lines = on_terminal(monkeypatch, 60, columns, [row, [*row[:3], "", "2", ""]])
    assert lines[1:] == [
        "2026-11-25 17:00:00  anna  set training.learning_rate",
        "    from 0.00025; to 0.0001; why the loss rises [1]",
        "2026-11-25 17:00:00  anna  set training.learning_rate",
        "    to 2",
    ]
    assert all(len(line) <= 60 for line in lines)


def test_empty_tables_have_their_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_terminal(monkeypatch, 80, ["id", "run"], []) == ["id  run"]


@pytest.mark.parametrize(("brought", "told"), [(None, "1 min 40 s"), (229.0, "3 min 49 s")])
def test_a_line_of_progress_has_the_estimate_that_it_brings_or_that_of_the_pace(
    brought: float | None, told: str
) -> None:
    pace = console._Pace()
    first, later = (CountedLine(f"{done} of 30", "rollouts", done, 30, brought) for done in (10, 20))
    assert pace.line(first, 0.0) == ("10 of 30" if brought is None else f"10 of 30; about {told} left")
    assert pace.line(later, 100.0) == f"20 of 30; about {told} left"
