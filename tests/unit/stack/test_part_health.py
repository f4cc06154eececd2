"""The states of a part: what supervisord and the probes say, and what follows."""

import copy
from pathlib import Path

import pytest

from stack.part_health import (
    END_SECONDS,
    MAX_SHORT_LIVES,
    SLOWEST_PACE,
    STABLE_SECONDS,
    HealthAction,
    HealthLimits,
    HealthState,
    PartHealth,
    health_path,
    read_health,
    write_health,
)

LIMITS = HealthLimits(failing_seconds=60, start_seconds=300)


@pytest.fixture
def part() -> PartHealth:
    """A part that answers since second 10, process 1."""
    part = PartHealth("engine")
    part.see_process(1, 1.0, True, 0.0, "")
    part.see_success("ready", 10.0)
    return part


def test_a_new_process_starts_and_answers_after_its_first_success() -> None:
    part = PartHealth("engine")
    part.see_process(None, 0.0, True, 1.0, "")
    assert part.state is HealthState.STARTING
    part.see_process(1, 1.0, True, 2.0, "")
    part.see_failure("loading", 3.0)
    assert (part.state, part.reason, part.restarts) == (HealthState.STARTING, "loading", 0)
    part.see_success("ready", 4.0)
    assert (part.state, part.since, part.reason) == (HealthState.ANSWERING, 4.0, "")


def test_a_failure_is_forgotten_with_the_next_success(part: PartHealth) -> None:
    part.see_failure("slow", 20.0)
    assert part.act(LIMITS, None, 79.0) is HealthAction.NOTHING and part.state is HealthState.FAILING
    part.see_success("ready", 79.5)
    part.see_failure("slow", 80.0)
    assert part.act(LIMITS, None, 139.0) is HealthAction.NOTHING


def test_a_part_that_fails_for_long_is_restarted_with_its_reason(part: PartHealth) -> None:
    part.see_failure("no answer", 20.0)
    part.see_failure("still no answer", 50.0)
    assert part.act(LIMITS, None, 81.0) is HealthAction.RESTART
    assert part.act(LIMITS, None, 82.0) is HealthAction.NOTHING, "it is being ended"
    part.see_process(2, 2.0, True, 95.0, "an old line of its log")
    assert (part.state, part.restarts, part.pid) == (HealthState.STARTING, 1, 2)
    assert part.last_error == "no answer for 61 s: still no answer"
    part.see_success("ready", 100.0)
    assert part.last_error, "the last error is kept until `ratchet up`"


def test_a_start_that_took_too_long_gets_twice_the_time_until_the_part_has_answered(part: PartHealth) -> None:
    now, waited = 20.0, []
    for pid in (2, 3, 4):
        part.see_process(pid, float(pid), True, now, "")
        part.see_failure("it loads its model", now + 1)
        for seconds in range(0, 4000, 100):
            if part.act(LIMITS, None, now + seconds) is HealthAction.RESTART:
                waited.append(seconds)
                now += seconds
                break
    assert waited == [400, 700, 1300]
    given_up = copy.deepcopy(part)
    part.see_process(5, 5.0, True, now, "")
    part.see_success("ready", now + 1)
    part.see_process(6, 6.0, True, now + 100, "")
    assert part.act(LIMITS, None, now + 401) is HealthAction.RESTART
    given_up.see_process(5, 5.0, True, now, "")
    given_up.see_failure("it loads its model", now + 1)
    assert given_up.act(LIMITS, None, now + 2401) is HealthAction.RESTART
    assert given_up.see_process(6, 6.0, True, now + 2402, "") is HealthAction.STOP
    assert given_up.reason == "it did not answer after 4 starts; `ratchet up` starts it again"


def test_a_process_that_ends_by_itself_is_counted_with_the_error_of_its_log(part: PartHealth) -> None:
    part.see_process(None, 1.0, True, 50.0, "ValueError: head size 96")
    assert (part.state, part.restarts, part.last_error) == (HealthState.STARTING, 1, "ValueError: head size 96")
    part.see_process(2, 2.0, True, 51.0, "")
    assert part.restarts == 1, "the new process belongs to the same restart"
    part.see_process(3, 3.0, True, 52.0, "")
    assert part.restarts == 2, "an end between two looks"


def test_a_process_that_is_never_seen_alive_is_counted_by_its_start(part: PartHealth) -> None:
    """It dies within milliseconds, or cannot be executed, and each look comes between two starts."""
    part.see_process(None, 2.0, True, 20.0, "exec format error")
    assert (part.restarts, part.last_error) == (2, "exec format error"), "the one that answered, and the next one"
    part.see_process(None, 2.0, True, 21.0, "")
    assert part.restarts == 2
    actions = [part.see_process(None, 3.0 + life, True, 22.0 + life, "") for life in range(3)]
    assert actions == [HealthAction.NOTHING, HealthAction.NOTHING, HealthAction.STOP]


def test_short_lives_end_in_given_up_and_only_a_person_starts_the_part_again(part: PartHealth) -> None:
    actions = [
        part.see_process(2 + life, 2.0 + life, True, 20.0 + life, "dies at once") for life in range(MAX_SHORT_LIVES)
    ]
    assert actions == [HealthAction.NOTHING] * (MAX_SHORT_LIVES - 1) + [HealthAction.STOP]
    assert part.state is HealthState.GIVEN_UP and "`ratchet up`" in part.reason
    part.see_process(None, 1.0, False, 100.0, "")
    assert part.act(LIMITS, None, 10_000.0) is HealthAction.NOTHING
    assert part.summary(100.0).startswith("given up for") and "dies at once" in part.summary(100.0)
    part.see_process(9, 9.0, True, 10_001.0, "")
    assert (part.state, part.restarts, part.last_error, part.short_lives) == (HealthState.STARTING, 0, "", [])


def test_a_part_that_worked_for_a_while_between_its_ends_is_never_given_up(part: PartHealth) -> None:
    now = 10.0
    for life in range(3 * MAX_SHORT_LIVES):
        part.see_success("ready", now)
        now += STABLE_SECONDS
        part.see_success("ready", now)
        now += 1.0
        assert part.see_process(2 + life, 2.0 + life, True, now, "killed") is HealthAction.NOTHING
    assert part.restarts == 3 * MAX_SHORT_LIVES


def test_time_in_which_a_part_fails_is_no_stable_life(part: PartHealth) -> None:
    """One success, then silence until the restart: five such lives are given up."""
    now = 10.0
    for life in range(MAX_SHORT_LIVES):
        part.see_success("ready", now)
        part.see_failure("silent", now + 1.0)
        now += 70.0
        assert part.act(LIMITS, None, now) is HealthAction.RESTART
        part.see_process(2 + life, 2.0 + life, True, now + 1.0, "")
        now += 2.0
    assert part.state is HealthState.GIVEN_UP


def test_a_clock_stands_still_while_a_needed_part_does_not_answer(part: PartHealth) -> None:
    part.see_failure("store away", 20.0)
    for second in range(20, 2000, 10):
        assert part.act(LIMITS, "postgres", float(second)) is HealthAction.NOTHING
    assert (part.state, part.reason) == (HealthState.WAITING, "waits for postgres")
    assert part.act(LIMITS, None, 2000.0) is HealthAction.NOTHING and part.state is HealthState.FAILING
    assert part.act(LIMITS, None, 2059.0) is HealthAction.NOTHING, "it has its whole limit from then on"
    assert part.act(LIMITS, None, 2062.0) is HealthAction.RESTART


def test_a_late_answer_is_slow_and_its_time_counts_at_the_machines_pace(part: PartHealth) -> None:
    part.see_failure("no answer within 10 s", 20.0, is_slow=True)
    assert part.state is HealthState.SLOW
    assert part.summary(32.0) == "slow, last answer 22 s ago: no answer within 10 s"
    for second in range(20, 600):
        part.pass_time(1.0, SLOWEST_PACE)
        assert part.act(LIMITS, None, float(second)) is HealthAction.NOTHING, "a tenth of 580 s"
    part.see_failure("no answer within 30 s", 600.0)
    assert (part.state, part.since) == (HealthState.FAILING, 20.0), "one time without an answer"
    part.pass_time(10.0, SLOWEST_PACE)
    assert part.act(LIMITS, None, 605.0) is HealthAction.RESTART, "a failing part has real time"


def test_a_start_counts_at_the_machines_pace() -> None:
    part = PartHealth("engine")
    part.see_process(1, 1.0, True, 0.0, "")
    part.pass_time(1000.0, 0.25)
    part.see_failure("it loads its model", 1000.0)
    assert part.act(LIMITS, None, 1000.0) is HealthAction.NOTHING
    assert part.act(LIMITS, None, 1051.0) is HealthAction.RESTART


def test_a_file_of_a_watcher_without_paces_restarts_nothing(tmp_path: Path, part: PartHealth) -> None:
    part.see_failure("no answer", 1e9)
    write_health(tmp_path, [part], 1e9)
    path = health_path(tmp_path)
    path.write_text(path.read_text().replace('"counted_from"', '"unknown"'))
    assert read_health(tmp_path)["engine"].act(LIMITS, None, 1e9 + 59) is HealthAction.NOTHING


def test_the_watchers_own_gap_counts_against_no_part(part: PartHealth) -> None:
    part.see_failure("slow", 20.0)
    part.hold(3600.0)  # the laptop was closed for an hour
    assert part.act(LIMITS, None, 3640.0) is HealthAction.NOTHING


def test_a_part_that_never_answers_is_restarted_after_its_start_limit() -> None:
    part = PartHealth("adapter")
    part.see_process(1, 1.0, True, 0.0, "")
    part.see_failure("no parser", 5.0)
    assert part.act(LIMITS, None, 299.0) is HealthAction.NOTHING
    assert part.act(LIMITS, None, 301.0) is HealthAction.RESTART


def test_stopped_by_a_person_is_no_failure(part: PartHealth) -> None:
    part.see_process(None, 1.0, False, 20.0, "")
    assert part.state is HealthState.STOPPED and part.summary(21.0) == "" and part.restarts == 0


def test_the_next_watcher_finds_what_this_one_wrote(part: PartHealth, tmp_path: Path) -> None:
    part.see_failure("no answer", 20.0)
    part.act(LIMITS, None, 81.0)
    write_health(tmp_path, [part], 82.0)
    assert read_health(tmp_path) == {"engine": part}
    found = read_health(tmp_path)["engine"]
    found.see_process(1, 1.0, True, 90.0, "")
    assert found.state is HealthState.RESTARTING and found.pid == 1
    assert found.act(LIMITS, None, 81.0 + END_SECONDS) is HealthAction.NOTHING
    assert found.act(LIMITS, None, 82.0 + END_SECONDS) is HealthAction.RESTART, "its process has not ended"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": [{"name": "x", "colour": "red"}]}'])
def test_a_file_that_cannot_be_read_is_no_knowledge(tmp_path: Path, text: str) -> None:
    (tmp_path / "health.json").write_text(text)
    assert read_health(tmp_path) == {}


def test_a_field_of_a_later_version_hides_no_part(tmp_path: Path, part: PartHealth) -> None:
    """`ratchet up` of one version reads the file of a watcher of the next one."""
    write_health(tmp_path, [part], 82.0)
    path = health_path(tmp_path)
    path.write_text(path.read_text().replace('"restarts"', '"mood": "good", "restarts"'))
    assert read_health(tmp_path) == {"engine": part}


def test_a_part_that_a_setting_stops_is_not_restarted(part: PartHealth) -> None:
    part.see_success("ready", 10.0)
    part.see_failure("read-only", 20.0, restart_helps=False)
    for now in (21.0, 1_000.0, 100_000.0):
        assert part.act(LIMITS, None, now) is HealthAction.NOTHING
    assert part.state is HealthState.WAITING and "read-only" in part.summary(100_001.0)
    part.see_failure("no answer", 100_010.0)
    assert part.act(LIMITS, None, 100_011.0) is HealthAction.NOTHING
    part.see_success("ready", 100_020.0)
    assert part.state is HealthState.ANSWERING and part.restart_helps
