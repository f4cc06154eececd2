"""The bar in a terminal, and what stays on the screen when it has gone."""

import io

from rich.console import Console

from cli.progress_bar import ProgressBar
from ratchet.progress import CountedLine


def screen(lines: list[str]) -> str:
    out = io.StringIO()
    bar = ProgressBar(Console(file=out, width=80, force_terminal=True, color_system=None))
    for number, line in enumerate(lines):
        elapsed = f"[{number:6.1f} s]"
        bar.show(line, elapsed, "; about 3 min left") if isinstance(line, CountedLine) else bar.print_above(
            f"{elapsed} {line}"
        )
    return out.getvalue()


def counted(done: int) -> CountedLine:
    return CountedLine(f"update {done} of 100", "updates", done, 100)


def test_a_bar_is_drawn_and_ends_with_its_work() -> None:
    text = screen([counted(10), counted(50), "a line above", counted(100), "afterwards"])
    assert "━" in text and "about 3 min left" in text
    assert "[   2.0 s] a line above" in text
    last = text.rstrip().splitlines()[-1]
    assert last.endswith("[   4.0 s] afterwards") and "━" not in last


def test_the_first_and_the_last_line_stay() -> None:
    text = screen([counted(10), counted(50), counted(100)])
    assert "[   0.0 s] update 10 of 100\n" in text and "[   2.0 s] update 100 of 100\n" in text


def test_other_work_gets_a_bar_of_its_own() -> None:
    text = screen([counted(10), CountedLine("compiled 3 of 9 packages", "packages", 3, 9), counted(100)])
    assert "compiled 3 of 9 packages\n" in text and "update 100 of 100\n" in text
