"""The evidence of the benchmark of recovery: rows of the store, lines of the engine's log, boxes of the provider.

Nothing here calls the product's own reports. The store is read by plain SQL.
"""

import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from tests.chaos.seeded_engine import MemberScript, member_script

_PATIENCE_SECONDS = 180.0
REWARDED = ("graded", "rejected")


class Store:
    """Reads the store by SQL, through outages of the server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def rows(self, sql: str, *arguments: Any, patience_seconds: float = _PATIENCE_SECONDS) -> list[Any]:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return asyncio.run(self._rows(sql, arguments))
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    async def _rows(self, sql: str, arguments: tuple[Any, ...]) -> list[Any]:
        connection = await asyncpg.connect(self.url, timeout=10)
        try:
            return list(await connection.fetch(sql, *arguments, timeout=30))
        finally:
            connection.terminate()

    def value(self, sql: str, *arguments: Any) -> Any:
        return self.rows(sql, *arguments)[0][0]


class CallKey(NamedTuple):
    """The identity of a call, however often and in whichever attempts it was asked."""

    rollout: int
    number: int


@dataclass(slots=True)
class Call:
    """One call as the engine saw it. `ended_at` None: it is in flight."""

    turn: str
    rollout: int
    attempt: int
    number: int
    tokens: int
    asked_at: float
    ended_at: float | None = None
    is_answered: bool = False

    @property
    def key(self) -> CallKey:
        """The identity of the call, which repetitions share."""
        return CallKey(self.rollout, self.number)


def read_calls(log: Path) -> list[Call]:
    """Return all calls in the order in which they arrived."""
    calls: list[Call] = []
    open_calls: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for line in log.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # cut by a kill or a full disk
            continue
        if event["event"] == "started":  # the calls of the process before died with it
            for call in (call for waiting in open_calls.values() for call in waiting):
                call.ended_at = event["at"]
            open_calls.clear()
            continue
        key = (event["turn"], event["number"])
        if event["event"] == "asked":
            call = Call(*(event[name] for name in ("turn", "rollout", "attempt", "number", "tokens", "at")))
            calls.append(call)
            open_calls[key].append(call)
        elif open_calls[key]:
            call = open_calls[key].pop()
            call.ended_at = event["at"]
            call.is_answered = event["event"] == "answered"
    return calls


@dataclass(frozen=True, slots=True)
class Tokens:
    """Model tokens around a fault. `again`: of calls that had been asked before, in any attempt. `in_flight`: of
    the calls whose answers were not stored yet when the fault began, and of those that were first asked during the
    fault and not answered in it.
    """

    again: int
    in_flight: int


def unstored_turns(store: Store, rollouts: list[int], at: float) -> set[str]:
    """Return the turns of these rollouts that were begun and not stored at that time, named as in the log."""
    sql = (
        "SELECT id FROM turn WHERE rollout_id = ANY($1::bigint[]) AND created_at <= to_timestamp($2)"
        " AND (completed_at IS NULL OR completed_at > to_timestamp($2))"
    )
    return {f"turn-{row[0]}" for row in store.rows(sql, rollouts, at)}


def count_tokens(calls: list[Call], unstored: set[str], began_at: float, over_at: float, ended_at: float) -> Tokens:
    """Count what was generated again between the fault's beginning and `ended_at`; the fault was over at `over_at`.

    All are seconds since the epoch. `unstored`: turns whose answers were not stored when the fault began. An answer
    that the engine has given is in flight until it is stored, because a fault can hit the adapter on the way.
    """
    before = [call for call in calls if call.asked_at <= began_at]
    newest = {call.key: call for call in before}
    seen: set[CallKey] = set()
    again, in_flight = 0, 0
    for call in calls:
        was_open = call.asked_at <= began_at and (call.ended_at is None or call.ended_at > began_at)
        is_on_its_way = newest.get(call.key) is call and call.is_answered and call.turn in unstored
        is_cut = began_at < call.asked_at <= over_at and (not call.is_answered or (call.ended_at or 0) > over_at)
        if was_open or is_on_its_way or (call.key not in seen and is_cut):
            in_flight += call.tokens
        if call.key in seen and began_at < call.asked_at <= ended_at:
            again += call.tokens
        seen.add(call.key)
    return Tokens(again, in_flight)


def begun_again(store: Store, calls: list[Call], began_at: float) -> set[int]:
    """Return the rollouts whose first call the engine has answered before, and was asked for again since this moment,
    by a further attempt.
    """
    first = [call for call in calls if call.number == 0]
    answered = {call.rollout for call in first if call.is_answered and (call.ended_at or 0) <= began_at}
    rows = store.rows("SELECT rollout_id, n FROM attempt WHERE n > 1 AND created_at > to_timestamp($1)", began_at)
    further = {(row["rollout_id"], row["n"]) for row in rows}
    return {call.rollout for call in first if (call.rollout, call.attempt) in further and call.rollout in answered}


# ---------------------------------------------------------------- rollouts

_ROLLOUTS = (
    "SELECT r.id, r.member, r.outcome, r.outcome_reason, r.reward, r.attempt, r.num_trained_tokens, k.label,"
    " r.replaced_by, (SELECT count(*) FROM grade g WHERE g.rollout_id = r.id) AS num_grades,"
    " (SELECT count(*) FROM turn t WHERE t.rollout_id = r.id AND t.state = 'completed' AND t.attempt ="
    "   (SELECT max(n) FROM attempt a WHERE a.rollout_id = r.id)) AS num_turns,"
    " (SELECT coalesce(sum(s.length), 0) FROM chain c JOIN chain_span s ON s.chain_id = c.id"
    "   WHERE c.rollout_id = r.id AND s.trained) AS num_span_tokens"
    " FROM rollout r JOIN task k ON k.id = r.task_id WHERE r.id = ANY($1::bigint[])"
)


@dataclass(slots=True)
class Findings:
    """The faults of a set of rollouts; each entry names a rollout and says what is wrong with it."""

    duplicates: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    invented: list[str] = field(default_factory=list)
    num_solved: int = 0
    num_graded: int = 0
    num_expected_to_solve: int = 0
    num_rollouts: int = 0

    @property
    def bias(self) -> float:
        """Share of solved among the graded, less the share that the same members solve undisturbed."""
        if not self.num_graded or not self.num_rollouts:
            return 0.0
        return self.num_solved / self.num_graded - self.num_expected_to_solve / self.num_rollouts


def examine(
    store: Store, calls: list[Call], rollout_ids: list[int], seed: int, undisturbed: dict[tuple[str, int], float]
) -> Findings:
    """Compare rollouts that should have ended with what the engine answered and with the undisturbed run.

    `undisturbed`: (task, member) → reward.
    """
    found = Findings()
    answered: dict[int, dict[int, int]] = defaultdict(dict)  # a further attempt has the answers of the one before
    for call in calls:
        if call.is_answered:
            answered[call.rollout][call.number] = call.tokens
    for row in store.rows(_ROLLOUTS, rollout_ids):
        script = member_script(seed, row["label"], row["member"])
        _examine_one(found, row, answered.get(row["id"], {}), script)
        expected = undisturbed.get((row["label"], row["member"]))
        if row["reward"] is not None and expected is not None and row["reward"] != expected:
            found.wrong.append(f"rollout {row['id']}: reward {row['reward']}, undisturbed {expected}")
    return found


def _examine_one(found: Findings, row: Any, seen: dict[int, int], script: MemberScript) -> None:
    """`seen`: number of the turn → tokens of the engine's newest answer."""
    name = f"rollout {row['id']}"
    found.num_rollouts += 1
    found.num_expected_to_solve += script.solves
    if row["outcome"] not in REWARDED:
        found.missing.append(f"{name}: {row['outcome'] or 'no outcome'}: {row['outcome_reason'][:200]}")
        return
    found.num_graded += 1
    found.num_solved += row["reward"] == 1.0
    if row["reward"] != float(script.solves):
        found.wrong.append(f"{name}: reward {row['reward']}, its script {'solves' if script.solves else 'fails'}")
    if row["num_grades"] == 0 or script.num_turns - 1 not in seen:
        found.invented.append(f"{name}: {row['num_grades']} grades, {len(seen)} answers of the engine")
    if row["num_grades"] > 1:
        found.duplicates.append(f"{name}: {row['num_grades']} grades")
    if row["num_turns"] > len(seen):
        found.duplicates.append(f"{name}: {row['num_turns']} turns, {len(seen)} answers of the engine")
    if row["num_turns"] < len(seen):
        found.missing.append(f"{name}: {row['num_turns']} turns stored, {len(seen)} answered")
    total = sum(seen.values())
    if row["num_span_tokens"] != total:
        kind = found.duplicates if row["num_span_tokens"] > total else found.missing
        kind.append(f"{name}: {row['num_span_tokens']} tokens to train, {total} answered")


def trained_twice(store: Store, run_id: str) -> list[str]:
    """Return the groups that more than one committed or planned step trains."""
    rows = store.rows(
        "SELECT g, count(*) AS n FROM (SELECT DISTINCT b.step, m->>'group_id' AS g FROM batch b,"
        " jsonb_array_elements(b.members) m WHERE b.run_id = $1) x GROUP BY g HAVING count(*) > 1",
        run_id,
    )
    return [f"group {row['g']} is in {row['n']} steps" for row in rows]


def leaked_boxes(store: Store, listed: dict[str, str]) -> list[str]:
    """Return the provider's boxes that no open rollout owns. `listed`: provider's id → the ledger's uuid."""
    owned = {
        str(row["uuid"])
        for row in store.rows(
            "SELECT s.uuid FROM sandbox s JOIN rollout r ON r.id = s.rollout_id"
            " WHERE s.state <> 'released' AND r.outcome IS NULL"
        )
    }
    return [box_id for box_id, uuid in listed.items() if uuid and uuid not in owned]
