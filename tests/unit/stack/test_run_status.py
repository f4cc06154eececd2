"""The sentences of `ratchet status` on activities that are tried again."""

from ratchet.temporal_client import PendingActivity
from stack.run_status import retried_activities

FULL = "all 4 boxes (sandbox.max_boxes) are taken"


def test_a_wait_for_room_is_no_failure_and_hides_none() -> None:
    waiting = [PendingActivity("boot", 4, "", FULL, is_waiting=True) for _ in range(3)]
    failing = PendingActivity("grade", 3, "", "the box is gone")
    found = retried_activities([*waiting, failing, PendingActivity("agent", 1, "runs pytest", "")])
    assert [one.sentence() for one in found] == [
        "grade has failed 2 times and is tried again: the box is gone",
        f"boot waits for room: {FULL}",
    ]
    assert [one.count for one in found] == [1, 3]
