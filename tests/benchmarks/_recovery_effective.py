"""Effective training time with a part away for a tenth of the time, beside two simpler ways to recover.

Windows of one run: without faults, and three with the same faults (a seeded part is killed and stays away for 5 s of
every 50 s). In the second of the three every rollout in flight is thrown away after a fault, as if the job restarted
from its checkpoint; in the third those that had a model call in flight are, as if a failed rollout began anew. A
rollout is thrown away by ending its box. Both ways get credit: graders and learner keep their work.

A round has one window of each way. Every round begins with another way and draws other faults, so that what else the
machine does, and what a window leaves to the next one, meets every way alike.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cli.console import say
from tests.benchmarks._recovery_evidence import Call, read_calls
from tests.benchmarks._recovery_stack import Recovery
from tests.chaos.machine_faults import kill_boxes

_AWAY_SECONDS, _EVERY_SECONDS = 5.0, 50.0
_NUM_FAULTS = 2
_ROUNDS = 4
_PARTS = ("worker-agent", "adapter", "engine", "gateway", "postgres", "temporal")
_BOXES = (
    "SELECT s.provider_id, s.rollout_id FROM sandbox s JOIN rollout r ON r.id = s.rollout_id"
    " WHERE r.run_id = $1 AND r.outcome IS NULL AND s.state = 'live' AND s.role = 'agent'"
)

ThrowAway = Callable[[Recovery, set[int]], int]


@dataclass(frozen=True, slots=True)
class Window:
    """`began_at` and `ended_at`: seconds since the epoch. `thrown_away`: boxes that the way to recover has ended."""

    began_at: float
    ended_at: float
    thrown_away: int


def measure_effective_time(recovery: Recovery, seed: int) -> dict[str, Any]:
    """Return per way to recover the verdicts per minute, their share of the undisturbed, and the lost model tokens."""
    ways: dict[str, ThrowAway | None] = {
        "undisturbed": None,
        "ratchet": lambda recovery, asking: 0,
        "restart_from_checkpoint": lambda recovery, asking: _throw_away(recovery, None),
        "retry_the_whole_rollout": _throw_away,
    }
    windows: dict[str, list[Window]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(_ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            recovery.wait_until_steady()
            windows[name].append(_pass_window(recovery, random.Random(f"effective {seed} {number}"), ways[name]))
            say(f"effective training time: {name} measured, round {number + 1} of {_ROUNDS}")
    recovery.wait_until_steady()
    calls = read_calls(recovery.stack.engine_log)
    figures = {name: _figures(recovery, calls, passed) for name, passed in windows.items()}
    rate = figures["undisturbed"]["verdicts_per_minute"]
    for facts in figures.values():
        facts["effective_share"] = round(facts["verdicts_per_minute"] / rate, 3)
    return {
        "away_share": _AWAY_SECONDS / _EVERY_SECONDS,
        "rounds": _ROUNDS,
        "faults_per_window": _NUM_FAULTS,
        **figures,
    }


def _pass_window(recovery: Recovery, rng: random.Random, way: ThrowAway | None) -> Window:
    began_at, thrown_away = time.time(), 0
    for number in range(_NUM_FAULTS):
        if way is not None:
            asking = _asking(recovery)
            recovery.faults.hold_down(rng.choice(_PARTS), _AWAY_SECONDS)
            thrown_away += way(recovery, asking)
        time.sleep(max(0.0, began_at + (number + 1) * _EVERY_SECONDS - time.time()))
    return Window(began_at, time.time(), thrown_away)


def _asking(recovery: Recovery) -> set[int]:
    """Return the rollouts that have a model call in flight."""
    return {call.rollout for call in read_calls(recovery.stack.engine_log) if call.ended_at is None}


def _throw_away(recovery: Recovery, rollouts: set[int] | None) -> int:
    """End the agents' boxes of these rollouts, of all in flight if None; return how many."""
    rows = recovery.store.rows(_BOXES, recovery.run_id)
    chosen = [row["provider_id"] for row in rows if rollouts is None or row["rollout_id"] in rollouts]
    return len(kill_boxes(recovery.stack, chosen))


def _figures(recovery: Recovery, calls: list[Call], windows: list[Window]) -> dict[str, Any]:
    """Return the figures of one way over all its windows. `rates`: verdicts per minute, window by window."""
    last = {row["id"]: row["attempt"] for row in recovery.store.rows("SELECT id, attempt FROM rollout")}
    verdicts = [_num_verdicts(recovery, window) for window in windows]
    minutes = [(window.ended_at - window.began_at) / 60 for window in windows]
    here = [call for call in calls if any(one.began_at <= call.asked_at <= one.ended_at for one in windows)]
    lost = [call for call in here if not call.is_answered or call.attempt < last.get(call.rollout, 0)]
    return {
        "seconds": round(60 * sum(minutes), 1),
        "verdicts_per_minute": round(sum(verdicts) / sum(minutes), 2),
        "rates": [round(count / length, 1) for count, length in zip(verdicts, minutes, strict=True)],
        "lost_token_share": round(sum(call.tokens for call in lost) / max(1, sum(call.tokens for call in here)), 4),
        "rollouts_thrown_away": sum(window.thrown_away for window in windows),
    }


def _num_verdicts(recovery: Recovery, window: Window) -> int:
    return int(
        recovery.store.value(
            "SELECT count(*) FROM rollout WHERE run_id = $1 AND reward IS NOT NULL"
            " AND ended_at BETWEEN to_timestamp($2) AND to_timestamp($3)",
            recovery.run_id,
            window.began_at,
            window.ended_at,
        )
    )
