"""The tasks that are left out because their groups always fail."""

from scheduling.quarantine import QuarantinedTask, choose_quarantined
from store.training_groups import FailedGroup


def failed(task_id: int, group_no: int, others_succeeded: bool = True) -> FailedGroup:
    return FailedGroup(task_id, f"task {task_id}", group_no, others_succeeded, f"reason {group_no}")


def test_three_failures_in_a_row_and_the_newest_reason() -> None:
    found = choose_quarantined([failed(1, 0), failed(2, 1), failed(1, 4), failed(2, 5), failed(1, 8)])
    assert found == [QuarantinedTask(1, "task 1", 3, "reason 8")]


def test_failures_that_all_tasks_shared_do_not_count() -> None:
    groups = [failed(1, 0), failed(1, 4), failed(1, 8, others_succeeded=False)]
    assert choose_quarantined(groups) == []
    assert choose_quarantined([*groups, failed(1, 12)]) == [QuarantinedTask(1, "task 1", 3, "reason 12")]
