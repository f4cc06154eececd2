"""Forks: rollouts that do again what another one did before a turn, and sample from there.

The members of a group with `forked_turn_id` have copies of the turns before that turn, as turns of an attempt 0 whose
session is closed. Their first attempt gets these as any attempt gets those of the attempts before it
(`adapter/turns/replay.py`). A copy has no logprobs, so it is context that is never trained.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, RowMapping, exists, func, insert, literal, select, text
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from ratchet.errors import ConfigError
from ratchet.types import Outcome, Purpose, SessionState, TurnKind, TurnState, policy_step
from store.arrays import pack_json, unpack_json
from store.columns import columns_of
from store.replayed_turns import COPIED
from store.retention import require_turns
from store.schema import RolloutGroupTable, RolloutTable, SessionTable, TurnTable

_OF_THE_ENGINE = {"logprobs", "routed_experts", "engine_id", "engine_wait_seconds"}
_NOT_COPIED = _OF_THE_ENGINE | {"lease_owner", "replayed_at", "created_at", "completed_at"}
_READ_BY_RULE = {"entropy": "logprobs", "first_edit": "answer"}
_NEW_IDS = text("SELECT nextval(pg_get_serial_sequence('turn', 'id')) FROM generate_series(1, :number)")


class ForkPoint(NamedTuple):
    """A turn from which rollouts may be forked. `version_spans`: what sampled it."""

    id: int
    rollout_id: int
    session_id: int
    task_id: int
    run_id: str
    temperature: float
    version_spans: list[dict[str, Any]] | None

    @property
    def policy(self) -> str | None:
        """The step that sampled the turn as RUN@STEP, None if it was no policy's."""
        version = self.version_spans[-1]["version"] if self.version_spans else None
        return f"{version.rpartition('/')[0]}@{policy_step(version)}" if version and "/" in version else None


async def fork_point(connection: AsyncConnection, turn_id: int) -> ForkPoint:
    """Return the fork point at a turn, whose run's turns stay in the store until the transaction ends. Raises
    ConfigError if they are archived."""
    columns = columns_of(ForkPoint, TurnTable, task_id=RolloutTable.task_id, run_id=RolloutTable.run_id)
    statement = select(*columns).join(RolloutTable, RolloutTable.id == TurnTable.rollout_id)
    row = (await connection.execute(statement.where(TurnTable.id == turn_id))).one_or_none()
    if row is None:
        raise ConfigError(f"turn {turn_id} is not in the store; the turns of an archived run cannot be forked")
    await require_turns(connection, row.run_id)
    return ForkPoint(*row)


async def turn_of_number(connection: AsyncConnection, rollout_id: int, number: int) -> int:
    """Return the id of the rollout's turn with this number, from 1, as pages and tables count. Raises ConfigError."""
    ids = select(TurnTable.id).where(TurnTable.rollout_id == rollout_id).order_by(TurnTable.id)
    found = list((await connection.execute(ids)).scalars())
    if not 1 <= number <= len(found):
        have = f"turns 1 to {len(found)}" if found else "none in the store; those of an archived run are gone"
        raise ConfigError(f"rollout {rollout_id} has no turn {number}; it has {have}")
    return found[number - 1]


class ForkableTurn(NamedTuple):
    """A turn before which a group may begin. `is_forked`: one does. `logprobs`, `answer`: as stored, or empty."""

    id: int
    task_id: int
    is_forked: bool
    logprobs: bytes
    answer: bytes


async def forkable_rollouts(
    connection: AsyncConnection, run_id: str, oldest_step: int, mixed: bool, left_out: Collection[int]
) -> list[int]:
    """Return the graded training rollouts of a run whose groups were made since the policy step `oldest_step`, without
    those of the tasks `left_out`, by id.

    Forks are left out: forks of forks would leave the states that the policy reaches by itself. `mixed`: only of groups
    whose rewards differ. All have the tokenizer, template and agent of the run.
    """
    one, group = RolloutTable, RolloutGroupTable
    counted = (one.outcome == Outcome.GRADED) & one.late.is_(False) & one.replaced_by.is_(None)
    found = select(one.id, func.array_agg(one.reward).over(partition_by=one.group_id))
    found = found.join(group, group.id == one.group_id).where(counted, group.forked_turn_id.is_(None))
    found = found.where(group.task_id.not_in(left_out))
    found = found.where(group.run_id == run_id, group.purpose == Purpose.TRAIN, group.started_step >= oldest_step)
    rows = await connection.execute(found.order_by(one.id))
    return [rollout_id for rollout_id, rewards in rows if not mixed or len(set(rewards)) > 1]


async def forkable_turns(connection: AsyncConnection, rollout_id: int, rule: str) -> list[ForkableTurn]:
    """Return the turns of a rollout's conversation that go on from another one, in order, with what the rule reads."""
    turn, is_forked = TurnTable, exists().where(RolloutGroupTable.forked_turn_id == TurnTable.id)
    empty = dict.fromkeys({"answer", "logprobs"} - {_READ_BY_RULE.get(rule)}, literal(b""))
    columns = columns_of(ForkableTurn, turn, task_id=RolloutTable.task_id, is_forked=is_forked, **empty)
    found = select(*columns).join(RolloutTable, RolloutTable.id == turn.rollout_id)
    found = found.where(turn.rollout_id == rollout_id, turn.attempt == RolloutTable.attempt)
    found = found.where(turn.kind == TurnKind.MAIN, turn.state == TurnState.COMPLETED, turn.parent_turn_id.is_not(None))
    found = found.where(turn.logprobs_valid, turn.num_sampled > 0)
    return [ForkableTurn(*row) for row in await connection.execute(found.order_by(turn.id))]


async def give_recorded_turns(connection: AsyncConnection, rollout_id: int) -> None:
    """Give a member of a forked group its copies, once; any other rollout gets none."""
    is_given = exists().where(SessionTable.rollout_id == rollout_id, SessionTable.attempt == 0)
    group = select(RolloutGroupTable.forked_turn_id).join(RolloutTable, RolloutTable.group_id == RolloutGroupTable.id)
    turn_id = await connection.scalar(group.where(RolloutTable.id == rollout_id, ~is_given))
    if turn_id is None:
        return
    point = await fork_point(connection, turn_id)
    source = (await connection.execute(select(SessionTable).where(SessionTable.id == point.session_id))).one()
    session = {"temperature": source.temperature, "model": source.model, "limits": source.limits}
    closed = {"rollout_id": rollout_id, "attempt": 0, "state": SessionState.CLOSED, "closed_at": func.now()}
    adding = pg_insert(SessionTable).values(**session, **closed).on_conflict_do_nothing().returning(SessionTable.id)
    session_id = (await connection.execute(adding)).scalar_one_or_none()
    if session_id is None:  # two tries of `boot`
        return
    rows, known = list[tuple[RowMapping, dict[str, Any]]](), {None}
    for row, request in await _turns_before(connection, point):  # one behind a turn that is not among them is none
        if request["after"] in known:
            rows.append((row, request))
            known.add(row["id"])
    ids = (await connection.execute(_NEW_IDS, {"number": len(rows)})).scalars()
    new_ids: dict[int | None, int] = dict(zip((row["id"] for row, _ in rows), ids, strict=True))
    own = {"session_id": session_id, "rollout_id": rollout_id, "attempt": 0, "logprobs_valid": False, "worker": COPIED}
    copies = []
    for row, request in rows:
        after, parent = new_ids.get(request["after"]), new_ids.get(row["parent_turn_id"])
        here = {"id": new_ids[row["id"]], "parent_turn_id": parent, "request": pack_json(request | {"after": after})}
        copies.append({**row, **own, **here})
    if copies:
        await connection.execute(insert(TurnTable), copies)


async def _turns_before(connection: AsyncConnection, point: ForkPoint) -> list[tuple[RowMapping, dict[str, Any]]]:
    """Return the turns, with their requests, that the agent had got when it asked for the one at the fork.

    Those of its session, and those that a later attempt was given again, unless they answer what a turn of the session
    answered otherwise.
    """
    kept = [column for column in TurnTable.__table__.columns if column.name not in _NOT_COPIED]
    here = TurnTable.session_id == point.session_id
    before = (TurnTable.rollout_id == point.rollout_id) & (TurnTable.id <= point.id)
    recorded = (TurnTable.state == TurnState.COMPLETED) & (here | TurnTable.replayed_at.is_not(None))
    wanted = before & (recorded | (TurnTable.id == point.id))
    rows = (await connection.execute(select(*kept).where(wanted).order_by(TurnTable.id))).mappings().all()
    found: list[tuple[RowMapping, dict[str, Any]]] = [(row, unpack_json(row["request"])) for row in rows]  # type: ignore[misc]
    own = {_asked(*one) for one in found if one[0]["session_id"] == point.session_id}
    before_it = [one for one in found if one[0]["id"] < point.id]
    return [one for one in before_it if one[0]["session_id"] == point.session_id or _asked(*one) not in own]


def _asked(row: RowMapping, request: dict[str, Any]) -> tuple[str, Any]:
    """Return the place of a request in its lane: behind a turn, or at the beginning with these messages."""
    return row["lane"], request["after"] or row["digest"]


@dataclass(slots=True, frozen=True)
class Fork:
    """A group that was forked from a rollout. `turn_id`: the turn that it sampled anew.

    `num_whole`: its members that asked again for all turns before that one. `mean_reward`: over the `num_verdicts` of
    these, an estimate of the value of the state there; the difference of two is the credit of the turns between them.
    """

    turn_id: int
    run_id: str
    group_id: int
    size: int
    num_whole: int
    num_verdicts: int
    mean_reward: float | None


async def forks_of(connection: AsyncConnection, rollout_id: int) -> list[Fork]:
    """Return the groups that were forked from a rollout, oldest first."""
    group = RolloutGroupTable
    reward = RolloutTable.reward
    values = {"num_whole": func.count(), "num_verdicts": func.count(reward), "mean_reward": func.avg(reward)}
    counts = {name: value.filter(_is_whole()) for name, value in values.items()}
    columns = columns_of(Fork, group, turn_id=group.forked_turn_id, group_id=group.id, **counts)
    statement = (
        select(*columns)
        .join(TurnTable, TurnTable.id == group.forked_turn_id)
        .join(RolloutTable, (RolloutTable.group_id == group.id) & RolloutTable.replaced_by.is_(None))
        .where(TurnTable.rollout_id == rollout_id)
    )
    return [Fork(*row) for row in await connection.execute(statement.group_by(group.id).order_by(group.id))]


def _is_whole() -> ColumnElement[bool]:
    """Return the condition that a rollout has asked again for all turns that it was given."""
    copy = aliased(TurnTable)
    is_copy = (copy.rollout_id == RolloutTable.id) & (copy.worker == COPIED)
    return ~exists().where(is_copy, copy.attempt < RolloutTable.attempt)
