"""The lines of `ratchet watch`: each turn once, in any order of their ends."""

from datetime import UTC, datetime, timedelta

from cli.turn_printer import TurnPrinter
from reads.turns import TurnContent

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def turn(id: int, state: str = "completed", text: str = "done", lane: str = "") -> TurnContent:
    answer = {"role": "assistant", "content": text} if state == "completed" else None
    ended = NOW + timedelta(seconds=2) if state == "completed" else None
    asked = [{"role": "user", "content": f"question {id}"}]
    return TurnContent(id, 1, lane, "main", state, None, 1234, 5, "stop", None, NOW, ended, None, "", 0, asked, answer)


def test_each_turn_is_printed_once_when_it_has_ended() -> None:
    printer = TurnPrinter(None)
    first = printer.lines_of([turn(1), turn(2, "in_flight"), turn(3, lane="sub")])
    assert [line for line in first if line.startswith("──")] == [
        "── turn 1 (id 1, lane main): 1,234 → 5 tokens, 2.0 s",
        "── turn 2 (id 3, lane sub): 1,234 → 5 tokens, 2.0 s",
    ]
    assert "… the policy answers a prompt of 1,234 tokens" in first and printer.after == 1
    assert printer.lines_of([turn(2, "in_flight"), turn(3)]) == []
    then = printer.lines_of([turn(2), turn(3)])
    assert sum(line.startswith("──") for line in then) == 1 and printer.after == 3


def test_a_long_call_does_not_hide_what_comes_after_it() -> None:
    printer = TurnPrinter(None)
    later = [turn(number, lane="sub") for number in range(2, 72)]
    printer.lines_of([turn(1, "in_flight"), *later])
    assert printer.num_ahead == 71 and printer.after == 0
    printer.lines_of([turn(1), *later])
    assert printer.num_ahead == 0 and printer.after == 71


def test_turns_without_an_answer_are_printed_when_the_rollout_has_ended() -> None:
    printer = TurnPrinter(None)
    lines = printer.lines_of([turn(1, "in_flight")], is_last=True)
    assert lines[-1] == "(no answer: the call was in_flight)"


def test_long_messages_are_cut_unless_all_is_wanted() -> None:
    text = "\n".join(f"line {number}" for number in range(40))
    assert "  … 28 more lines (--whole)" in TurnPrinter(12).lines_of([turn(1, text=text)])
    assert "  line 39" in TurnPrinter(None).lines_of([turn(1, text=text)])
