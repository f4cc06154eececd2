"""Argument and result of the Sweep workflow; the rules of `payloads.py` apply."""

from ratchet.payloads import Payload, StartInput


class SweepInput(StartInput):
    """`force`: kill more than `sweep.max_share` of the boxes if needed. `dry_run`: report only."""

    force: bool = False
    dry_run: bool = False


class SweepResult(Payload):
    """Counts of a sweep. `boxes`: for each killed box a line with the reason."""

    boxes_released: int = 0
    boxes_unknown: int = 0
    sessions_closed: int = 0
    rollouts_ended: int = 0
    runs_restarted: int = 0
    boxes: tuple[str, ...] = ()
    rollouts_archived: int = 0
    directories_deleted: int = 0
    rollouts_indexed: int = 0
