"""Hold back new groups while the sandbox service or the graders fail, so that rollouts are not lost in vain.

| state | condition | new groups |
|---|---|---|
| closed | at most half of the newest boots and of the newest grades failed, or fewer than MIN_COUNT ended | as usual |
| open | over half of them failed within five minutes | one a minute, to find out whether it works again |

The state is computed from the ledger of boxes whenever it is needed, so no process can lose it.
"""

from store.box_failures import BoxCounts

MIN_COUNT = 6
PROBE_SECONDS = 60.0


def reason_to_hold_back(counts: BoxCounts) -> str:
    """Return why new groups are held back, as one sentence; empty if they are not."""
    if _mostly_failed(counts.boots, counts.failed_boots):
        last = f"; the last error: {counts.boot_error}" if counts.boot_error else ""
        return f"{_share(counts.failed_boots, counts.boots)} newest boots of boxes failed{last}"
    if _mostly_failed(counts.grades, counts.failed_grades):
        return f"{_share(counts.failed_grades, counts.grades)} newest grading boxes gave no verdict"
    return ""


def groups_allowed(wanted: int, reason: str, seconds_since_newest: float | None) -> int:
    """Return how many of the wanted groups may start. `seconds_since_newest`: age of the newest group, None without."""
    if not reason:
        return wanted
    is_due = seconds_since_newest is None or seconds_since_newest >= PROBE_SECONDS
    return min(wanted, 1 if is_due else 0)


def _mostly_failed(count: int, failed: int) -> bool:
    return count >= MIN_COUNT and 2 * failed > count


def _share(failed: int, count: int) -> str:
    return f"{failed} of the {count}"
