"""Tasks that list their tests, such as SWE-bench's: the outcome of each listed test, those that matter first."""

from collections.abc import Mapping

from viewer.renderers.registry import OwnPart, ShownRollout

_PASSED = "passed"
_NOT_SEEN = "not seen"


def render(rollout: ShownRollout) -> list[OwnPart]:
    """Return a table of the tests that must newly pass, and of those that must still pass and did not."""
    if rollout.grade is None:
        return []
    listed = rollout.task.get("swe_bench") or rollout.task.get("swepro") or {}
    found = _outcomes(rollout.grade.tests)
    newly = [(name, found.get(name, _NOT_SEEN)) for name in listed.get("fail_to_pass", [])]
    still = [(name, found.get(name, _NOT_SEEN)) for name in listed.get("pass_to_pass", [])]
    broken = [one for one in still if one[1] != _PASSED]
    rows = [(name, "newly pass", outcome) for name, outcome in newly]
    rows += [(name, "still pass", outcome) for name, outcome in broken]
    num_newly = sum(outcome == _PASSED for _, outcome in newly)
    title = f"{num_newly} of {len(newly)} tests that must newly pass did, {len(still) - len(broken)} of {len(still)} "
    return [OwnPart(title + "that must still pass", rows=[("Test", "Must", "Outcome"), *rows])]


def _outcomes(tests: Mapping[str, object]) -> dict[str, str]:
    """Return the outcome of each test, and under a name without parameters the worst of all its parameters."""
    found: dict[str, str] = {}
    for name, outcome in tests.items():
        for known in {name, name.partition("[")[0]}:
            if found.get(known, _PASSED) == _PASSED:
                found[known] = str(outcome).lower()
    return found
