"""Judge what was observed of a test run: did it run tests, was the runner unchanged, did every expected test pass?

Pure functions on the host, shared by all graders. A patch's code runs in the runner's process and can change what the
witness sees, so each of these checks can be deceived by itself; the oracle and the control run do not depend on them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from grading.integrity_rules import TAMPERED
from grading.oracle import Oracle, is_code_missing, module_codes, name_digest, session_canary
from grading.printed_results import count_printed_tests, find_missing_program
from grading.run_hidden_tests import RunnerReport, RunnerSession, worse

COULD_NOT_RUN = (126, 127)
"""A shell's exit codes for "not executable" and "not found"."""
SIGNALLED = 128
"""A shell adds the number of the signal that ended a command."""
_RAN = ("passed", "failed", "xfailed", "xpassed")
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")


@dataclass(slots=True, frozen=True)
class Judgement:
    """`ok`: the evidence supports success. `rule`: the integrity rule that the run broke, empty if none."""

    ok: bool
    reason: str
    rule: str = ""


_OK = Judgement(True, "")


def find_gap(observed: RunnerReport, outcomes: Collection[str], by_witness: bool = False, by_name: bool = False) -> str:
    """Return why a run shows nothing of the patch, empty if it shows something.

    The evidence is a test that ran: reported by pytest's witness (`by_witness`), or by name in the log (`by_name`). A
    command without names is judged by its exit code, unless it says that it ran no test or did not find what it runs.
    `outcomes`: those of the tests that count. A run that did not end by itself has no gap: its end decides.
    """
    sessions = observed.top_sessions
    if observed.lost or observed.exit_code is None or any(map(_was_ended_from_inside, sessions)):
        return ""
    if by_witness and not sessions:
        gap = "pytest never started, or not as itself"
    elif any(outcome in _RAN for outcome in outcomes) or observed.exit_code > SIGNALLED:
        return ""
    elif sessions:
        gap = "pytest ran no test" if not outcomes else "pytest ran none of the tests that count"
    elif by_name:
        gap = "the log names none of the tests that count as run"
    else:
        gap = _gap_of_command(observed)
    missing = find_missing_program(observed.log) if gap else ""
    return f"{gap}: {missing}" if missing else gap


def _was_ended_from_inside(session: RunnerSession) -> bool:
    """Return whether a session did not end, or not as pytest does: it ends with 0 only if tests ran."""
    return session.exit is None or (session.exit == 0 and not session.tests)


def _gap_of_command(observed: RunnerReport) -> str:
    num_printed = count_printed_tests(observed.log)
    if num_printed:
        return ""
    if observed.exit_code in COULD_NOT_RUN:
        return f"the test command could not run (exit code {observed.exit_code})"
    if find_missing_program(observed.log):
        return "the test command did not find what it needs"
    return "the test command ran no test" if num_printed == 0 else ""


def judge_runner(observed: RunnerReport, oracle: Oracle | None = None, required: bool = False) -> Judgement:
    """Judge if runner and tests were unchanged, not test failures. `required`: the command names pytest."""
    sessions = observed.top_sessions
    if not sessions and required:
        return Judgement(False, "pytest never started, or not as itself")
    for session in [*sessions, *observed.workers]:
        judged = _judge_session(session, observed, oracle)
        if not judged.ok:
            return judged
    return _OK if oracle is None else _compare(observed, oracle)


def _judge_session(session: RunnerSession, observed: RunnerReport, oracle: Oracle | None) -> Judgement:
    if session.exit is None:
        return Judgement(False, "pytest began and never ended: it was stopped from inside")
    canary = session_canary(session, observed)
    if canary == "passed":
        return Judgement(False, "a test that must fail was reported as passed: the runner was changed", TAMPERED)
    # Without a canary no success counts. If every report is a failure, the tests could not even be imported.
    claims_success = any(outcome != "failed" for outcome in session.tests.values())
    known = ("failed", "unsupported", *(oracle.canaries if oracle else ()))
    if canary not in known and claims_success:
        return Judgement(False, "the canary test could not be run: the runner was changed", TAMPERED)
    if session.num_missed:
        return Judgement(False, f"{session.num_missed} collected tests never ran")
    for path, module in session.modules.items():
        if path and module.file and module.file.removesuffix("c") != path:
            return Judgement(False, f"the tests of {path} were loaded from {module.file}", TAMPERED)
        if module.changed:
            return Judgement(False, f"the code of the tests in {path} was changed while they ran", TAMPERED)
    return _OK


def _compare(observed: RunnerReport, oracle: Oracle) -> Judgement:
    """Compare sessions and test files' code with the gold runs; a patch writes the product's code in its own way."""
    num_sessions = len(observed.top_sessions)
    is_less = num_sessions < (oracle.num_sessions or 0)
    if is_less or (has_more_sessions(observed, oracle) and not oracle.may_run_more):
        return Judgement(False, f"pytest ran {num_sessions} times, and {oracle.num_sessions} times with the gold patch")
    names = {name_digest(name) for session in observed.top_sessions for name in session.tests}
    modules = module_codes(observed)
    for path, codes in oracle.modules.items():
        if is_code_missing(codes, modules.get(path, ()), names):
            return Judgement(False, f"the tests of {path} are not those that ran with the gold patch")
    return _OK


def has_more_sessions(observed: RunnerReport, oracle: Oracle | None) -> bool:
    """Return whether pytest ran more often than with the gold patch."""
    expected = None if oracle is None else oracle.num_sessions
    return expected is not None and len(observed.top_sessions) > expected


def lacks_canary(observed: RunnerReport, oracle: Oracle | None) -> bool:
    """Return whether a session could not run its canary, which the gold runs' sessions could."""
    if oracle is not None and "unsupported" in oracle.canaries:
        return False
    return any(session_canary(session, observed) == "unsupported" for session in observed.top_sessions)


def judge_sessions(
    observed: RunnerReport, required: bool, expected: Sequence[str] = (), oracle: Oracle | None = None
) -> Judgement:
    """Judge every session of pytest that the command started: each must have ended, unchanged and with success.

    `expected`: node ids that must have passed; the tests that passed with the gold patch must have passed, too.
    """
    judged = judge_tests(observed, required, expected, oracle)
    failed = next((session.exit for session in observed.top_sessions if session.exit != 0), 0)
    return Judgement(False, f"pytest ended with {failed}") if judged.ok and failed else judged


def judge_tests(
    observed: RunnerReport, required: bool, expected: Sequence[str] = (), oracle: Oracle | None = None
) -> Judgement:
    """Judge as `judge_sessions` does, except for the exit codes of the sessions."""
    judged = judge_runner(observed, oracle, required)
    if not judged.ok or not observed.top_sessions:
        return judged
    for session in observed.top_sessions:
        judged = _judge_outcomes(session, oracle)
        if not judged.ok:
            return judged
    tests = worst_outcomes(all_tests(observed), observed, oracle)
    if not any(outcome == "passed" for outcome in tests.values()):
        return Judgement(False, "no test passed")
    expected = [*expected, *(oracle.passed if oracle else ())]
    missing = [name for name in expected if not has_passed(name, tests.get(name, "missing"), oracle)]
    if missing:
        return Judgement(False, f"{len(missing)} of {len(expected)} expected tests did not pass, first {missing[0]}")
    return _OK


def _judge_outcomes(session: RunnerSession, oracle: Oracle | None) -> Judgement:
    failed = [name for name, outcome in session.tests.items() if outcome == "failed"]
    if failed and (oracle is None or any(oracle.outcomes.get(name, "passed") == "passed" for name in failed)):
        return Judgement(False, f"{len(failed)} tests failed, first {failed[0]}")
    foreign = [name for name in session.tests if skipped_by_product(session, name)]
    if foreign and oracle is None:
        return Judgement(
            False, f"{len(foreign)} tests were skipped from inside the code under test, first {foreign[0]}"
        )
    return _OK


def has_failed_test(outcomes: Mapping[str, str], listed: Mapping[str, str] | None, oracle: Oracle | None) -> bool:
    """Return whether a test that counts ran and failed, or a file of such tests could not be imported.

    `listed`: outcomes of the tests that the row lists; None: all tests count that the gold runs passed.
    """
    failed = {name for name, outcome in outcomes.items() if outcome == "failed"}
    if listed is None:
        return any(oracle is None or oracle.outcomes.get(name, "passed") == "passed" for name in failed)
    return "failed" in listed.values() or any(name.partition("::")[0] in failed for name in listed)


def has_passed(name: str, outcome: str, oracle: Oracle | None, may_xfail: bool = False) -> bool:
    """Return whether a test passed: `passed`, or `xfailed` as in gold runs; without oracle by `may_xfail`."""
    if outcome == "xfailed":
        return may_xfail if oracle is None else oracle.outcomes.get(name) == "xfailed"
    return outcome == "passed"


def skipped_by_product(session: RunnerSession, name: str) -> bool:
    """Return whether a skip or expected failure was raised by the code under test.

    That is: neither in the test's own file, nor in a conftest.py of the repository, nor in an installed package. The
    place is the reporting code's own file name, so this is for code that does not hide; an oracle decides.
    """
    if session.tests[name] not in ("skipped", "xfailed") or not session.places.get(name):
        return False
    place = session.places[name]
    own = f"{session.root}/{name.partition('::')[0]}"
    if place in (own, name.partition("::")[0]):
        return False
    in_repository = place.startswith(session.root + "/") or not place.startswith("/")
    if in_repository:
        return place.rpartition("/")[2] != "conftest.py"
    return not any(part in place for part in _INSTALLED)


def all_tests(observed: RunnerReport, worst: bool = False) -> dict[str, str]:
    """Return node id → outcome of all top sessions; a skip by the product is a failure.

    Of several sessions with a test the last one counts, or the one with the worst outcome.
    """
    found: dict[str, str] = {}
    for session in observed.top_sessions:
        for name, outcome in session.tests.items():
            told = "failed" if skipped_by_product(session, name) else outcome
            found[name] = worse(found.get(name, told), told) if worst else told
    return found


def worst_outcomes(outcomes: Mapping[str, str], observed: RunnerReport, oracle: Oracle | None) -> Mapping[str, str]:
    """Return the outcomes of a run, of each test the worst one if pytest ran more often than with the gold patch.

    So a session that the patch adds cannot cover a failure of another one. A name that the witness has not reported is
    a parser's, which may have read it from any session's log; it counts as failed.
    """
    if not has_more_sessions(observed, oracle):
        return outcomes
    seen = all_tests(observed, worst=True)
    return {**seen, **{name: worse(seen.get(name, "failed"), told) for name, told in outcomes.items()}}


def look_up(tests: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return name → outcome of the tests that a dataset names, `missing` for one that did not run.

    Lists made from printed summaries cut a name at its first space, and a name without parameters stands for all its
    parameters; the worst outcome of the tests that match counts.
    """
    cut: dict[str, list[str]] = {}
    for test, outcome in tests.items():
        for short in {test.split(" ", 1)[0], test.split("[", 1)[0]}:
            cut.setdefault(short, []).append(outcome)
    return {name: tests[name] if name in tests else _first_wrong(cut.get(name, ["missing"])) for name in names}


def _first_wrong(outcomes: Sequence[str]) -> str:
    return next((outcome for outcome in outcomes if outcome not in ("passed", "xfailed")), outcomes[0])
