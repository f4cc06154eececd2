"""The time of a rollout: swimlanes of its stages and turns, the graph of its turns, and its longest stage in a list."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from reads.rollout_list import RolloutLine
from reads.rollouts import BoxView, RolloutHead, TurnLine

_MIN_WIDTH = 0.002
"""Share of the whole time below which a bar would not be visible."""


@dataclass(slots=True, frozen=True)
class TimeBar:
    """One bar. `start` and `width` are shares of the whole time, `height` of the lane; `open`: it has not ended."""

    kind: str
    start: float
    width: float
    seconds: float
    label: str
    link: str = ""
    open: bool = False
    height: float = 1.0


@dataclass(slots=True, frozen=True)
class TimeLane:
    name: str
    bars: list[TimeBar]


@dataclass(slots=True, frozen=True)
class Timeline:
    """`seconds`: from the rollout's creation to its end, or to now."""

    seconds: float
    lanes: list[TimeLane]


@dataclass(slots=True, frozen=True)
class TurnNode:
    """A turn in the graph; `row` grows with every branch, `parent` is the index of the turn that it continues."""

    turn_id: int
    column: int
    row: int
    parent: int | None
    kind: str
    fork_cause: str | None
    label: str


@dataclass(slots=True, frozen=True)
class TurnGraph:
    nodes: list[TurnNode]
    num_rows: int


def build_timeline(head: RolloutHead, boxes: Sequence[BoxView], turns: Sequence[TurnLine], now: datetime) -> Timeline:
    """Return the lanes queue, boot, agent box, one lane of generation and one of tools, and the grading boxes."""
    begin = head.created_at
    end = head.ended_at or now
    whole = max((end - begin).total_seconds(), 0.001)
    lanes: dict[str, list[TimeBar]] = {}

    def add(lane: str, kind: str, start: datetime, stop: datetime | None, label: str, link: str = "") -> None:
        seconds = max(0.0, ((stop or now) - start).total_seconds())
        left = min(1.0, max(0.0, (start - begin).total_seconds() / whole))
        width = max(min(1.0 - left, seconds / whole), _MIN_WIDTH)
        lanes.setdefault(lane, []).append(TimeBar(kind, left, width, seconds, label, link, stop is None))

    add("queue", "queue", begin, head.claimed_at, "waits for a worker")
    free_since = head.claimed_at
    for box in boxes:
        if free_since is not None and free_since < box.created_at:
            add("queue", "queue", free_since, box.created_at, f"waits for a slot to boot the {box.role} box")
        free_since = box.released_at
        role, name, link = "agent" if box.role == "agent" else "grade", f"box {box.id}", f"#box-{box.id}"
        add("boot", "boot", box.created_at, box.live_at or box.released_at, f"{name} boots ({box.role})", link)
        if box.live_at is not None:
            add(f"{role} box", role, box.live_at, box.released_at, f"{name}, attempt {box.attempt}", link)
    last: dict[tuple[int, str], TurnLine] = {}
    for turn in turns:
        before = last.get((turn.attempt, turn.lane))
        link = f"/rollouts/{head.id}/turns/{turn.id}"
        suffix = f" {turn.lane}" if turn.lane else ""
        if before is not None and before.completed_at is not None and before.completed_at < turn.created_at:
            add(f"tools{suffix}", "tool", before.completed_at, turn.created_at, f"tools after turn {before.id}", link)
        words = f"turn {turn.id}: {turn.prompt_tokens} tokens in, {turn.num_sampled} out"
        stop = turn.completed_at or (None if turn.state == "in_flight" else turn.created_at)
        add(f"generate{suffix}", turn.kind, turn.created_at, stop, words, link)
        last[turn.attempt, turn.lane] = turn
    order = ("queue", "boot", "agent box", "generate", "tools", "grade box")
    names = sorted(lanes, key=lambda name: next((at for at, one in enumerate(order) if name.startswith(one)), 9))
    return Timeline(whole, [TimeLane(name, lanes[name]) for name in names])


def build_graph(turns: Sequence[TurnLine]) -> TurnGraph:
    """Place each turn right of the one before; a turn stays in its parent's row if it is the first to continue it."""
    index = {turn.id: at for at, turn in enumerate(turns)}
    continued: set[int] = set()
    nodes: list[TurnNode] = []
    num_rows = 0
    for column, turn in enumerate(turns):
        parent = index.get(turn.parent_turn_id) if turn.parent_turn_id is not None else None
        if parent is not None and parent not in continued:
            row = nodes[parent].row
            continued.add(parent)
        else:
            row = num_rows
            num_rows += 1
        label = f"turn {turn.id}, {turn.kind}" + (f", fork: {turn.fork_cause}" if turn.fork_cause else "")
        nodes.append(TurnNode(turn.id, column, row, parent, turn.kind, turn.fork_cause, label))
    return TurnGraph(nodes, num_rows)


_QUEUE = "queue"
"""The time from its row to the worker that claimed it; other stages have the names of `rollout.timings`."""
_WAITS = "waits between stages"
"""The rest: it waits for a box's slot, for a worker, or for the try after a failed one."""


@dataclass(slots=True, frozen=True)
class StageTime:
    name: str
    seconds: float


def took(line: RolloutLine) -> float:
    """Return the seconds from the rollout's creation to its end, or until now."""
    return ((line.ended_at or datetime.now(UTC)) - line.created_at).total_seconds()


def longest_stage(line: RolloutLine) -> StageTime | None:
    """Return the stage that took most of an ended rollout's time; None while it is open."""
    if line.ended_at is None:
        return None
    stages = {name: float(seconds) for name, seconds in line.timings.items()}
    if line.claimed_at is not None:
        stages[_QUEUE] = (line.claimed_at - line.created_at).total_seconds()
    stages[_WAITS] = took(line) - sum(stages.values())
    name = max(stages, key=lambda one: stages[one])
    return StageTime(name, stages[name])
