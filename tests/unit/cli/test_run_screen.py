"""The screen of a run shows every fact, however long they are, in 24 lines of 79 columns."""

import pytest

from cli.run_screen import lines_of
from ratchet.types import RunState
from reads.vitals import WAITS_FOR, Vital
from stack.run_status import Diagnosis


@pytest.mark.parametrize("num_words", [0, 3, 12, 40, 500])
def test_every_fact_is_on_the_screen(num_words: int) -> None:
    facts = [Vital(f"fact {number}", "7 of 9", "much to say " * num_words, "/runs") for number in range(18)]
    facts.insert(4, Vital(WAITS_FOR, "a person", "since noon", "/runs"))
    lines = lines_of(Diagnosis("r", RunState.RUNNING, vitals=facts, answer="a person"))
    assert len(lines) <= 24 and all(len(line) <= 79 for line in lines)
    assert lines[1] == "waits for: a person (since noon)"
    assert [
        number for number in range(18) if not any(line.startswith(f"fact {number}: 7 of 9") for line in lines)
    ] == []


def test_details_are_whole_if_there_is_room() -> None:
    facts = [Vital(WAITS_FOR, "nothing", "", "/runs"), Vital("pace", "1 an hour", "slow " * 40, "/runs", "▁█")]
    lines = lines_of(Diagnosis("r", RunState.RUNNING, vitals=facts))
    assert lines[2].startswith("pace: 1 an hour ▁█ (slow slow") and len(lines) == 5 and "…" not in "".join(lines)


def test_the_first_facts_have_their_details() -> None:
    facts = [Vital(WAITS_FOR, "nothing", "", "/runs")]
    facts += [Vital(f"fact {number}", "1", "word " * 60, "/runs") for number in range(18)]
    lines = lines_of(Diagnosis("r", RunState.RUNNING, vitals=facts, working=["rollout/r/0/0, agent: make test"]))
    assert lines[2].startswith("fact 0") and lines[5].startswith("fact 1") and lines[6].startswith("fact 2")
    assert len(lines) == 23 and lines[-1] == "rollout/r/0/0, agent: make test"


def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [Vital(f"fact {number}", "1", "word " * 60, "/runs") for number in range(18)]
    found = Diagnosis("r", RunState.DONE, vitals=facts)
    assert max(map(len, lines_of(found))) <= 79
    monkeypatch.setenv("FORCE_COLOR", "1")  # stdout is a terminal
    monkeypatch.setenv("COLUMNS", "200")
    assert 190 < max(map(len, lines_of(found))) <= 200
