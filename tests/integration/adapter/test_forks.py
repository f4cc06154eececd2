"""A fork does again what a rollout did before a turn, and samples from there: only that is trained."""

import pytest
from sqlalchemy import insert, select, update

from adapter.turns.loss_mask import build_chains
from ratchet.errors import ConfigError
from ratchet.types import Purpose, RunState
from reads.commands import read_packed_answers
from store import forks, groups, retention, sessions, turns
from store.arrays import ids_from_bytes
from store.groups import NewGroup
from store.replayed_turns import COPIED
from store.schema import RolloutTable, RunTable, TurnTable
from tests.integration.adapter.conftest import LIMITS, Opened, ScriptedEngine
from tests.integration.adapter.test_replay import LISTED, LISTED_LATER, converse, next_attempt, num_calls

SOLVED = {"outcome": "graded", "reward": 1.0}


async def fork(source: Opened, turn_id: int, group_no: int = 0, size: int = 1) -> list[Opened]:
    """Make a group of forks and begin the first attempt of each member, as the stage `boot` does."""
    async with source.database.begin() as conn:
        row = (await conn.execute(select(RolloutTable).where(RolloutTable.id == source.rollout_id))).one()
        name = f"evaluate/{row.run_id}/{group_no}"
        new = NewGroup(row.run_id, group_no, row.task_id, Purpose.EVAL, size, 1, 1.0, 0, name, "start-t1", turn_id)
        (group_id,) = await groups.create_groups(conn, [new], "test")
        of_group = select(RolloutTable.id).where(RolloutTable.group_id == group_id).order_by(RolloutTable.id)
        members = list((await conn.execute(of_group)).scalars())
    return [await begin(source, rollout_id) for rollout_id in members]


async def begin(source: Opened, rollout_id: int) -> Opened:
    async with source.database.begin() as conn:
        await conn.execute(update(RolloutTable).where(RolloutTable.id == rollout_id).values(attempt=1))
        await forks.give_recorded_turns(conn, rollout_id)
        await forks.give_recorded_turns(conn, rollout_id)  # `boot` may be tried again
        session_id = await sessions.open_session(conn, rollout_id, 1, 0.7, "policy", LIMITS)  # type: ignore[arg-type]
        token = await sessions.add_token(conn, session_id)
    return Opened(rollout_id, session_id, token, source.database)


async def recorded_stream(opened: Opened, number: int) -> list[int]:
    """The tokens that the engine saw and sampled up to a turn, counted from 1."""
    row = (await opened.turns())[number - 1]
    return [*ids_from_bytes(row.suffix_ids).tolist(), *ids_from_bytes(row.sampled_ids).tolist()]


async def test_each_member_replays_to_the_turn_and_samples_from_there(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("look", "edit", "test", "done", "edit more", "really done", "try", "done again")
    await converse(adapter, opened, LISTED)
    source = await opened.wait_delivered(4)
    members = await fork(opened, source[2].id, size=2)
    found = [await converse(adapter, one, LISTED_LATER) for one in members]
    assert found == [["look", "edit", "edit more", "really done"], ["look", "edit", "try", "done again"]]
    assert await num_calls(engine) == 8
    for one in members:
        rows = await one.wait_delivered(4)
        assert [row.replayed_at is not None for row in rows] == [True, True, False, False]
        assert [row.logprobs_valid for row in rows] == [False, False, True, True]
        async with opened.database.begin() as conn:
            (chain,) = build_chains(await turns.load_metas(conn, one.rollout_id, 1))
        assert chain.num_trained == sum(row.num_sampled for row in rows[2:])
    calls = (await engine.seen())["calls"]
    context = await recorded_stream(opened, 2)
    at = source[1].kept_tokens
    assert all(calls[number]["ids"][at : at + len(context)] == context for number in (2, 4, 6))
    assert [row.sampled_ids for row in await opened.turns()] == [row.sampled_ids for row in source]
    async with opened.database.begin() as conn:
        (shown,) = await forks.forks_of(conn, opened.rollout_id)
        assert (shown.turn_id, shown.size, shown.num_whole, shown.num_verdicts) == (source[2].id, 2, 2, 0)
        await conn.execute(update(RolloutTable).where(RolloutTable.id == members[0].rollout_id).values(**SOLVED))
        (shown,) = await forks.forks_of(conn, opened.rollout_id)
        assert (shown.num_verdicts, shown.mean_reward) == (1, 1.0)
        answers = await read_packed_answers(conn, [one.rollout_id for one in members])
    assert len(answers) == 4, "the commands of copied turns are those of the rollout that sampled them"


async def test_another_result_ends_the_way_back(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "edit", "test", "other", "end", "end")
    await converse(adapter, opened, LISTED[:2])
    source = await opened.wait_delivered(3)
    (one,) = await fork(opened, source[2].id)
    assert await converse(adapter, one, ["no such file", "nothing"]) == ["look", "other", "end"]
    async with opened.database.begin() as conn:
        await conn.execute(update(RolloutTable).where(RolloutTable.id == one.rollout_id).values(**SOLVED))
        (shown,) = await forks.forks_of(conn, opened.rollout_id)
    assert (shown.size, shown.num_whole, shown.num_verdicts, shown.mean_reward) == (1, 0, 0, None), (
        "it was not in the state before that turn"
    )


async def test_a_fork_can_be_forked_and_lose_its_box(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    """The fork's own turns and those that it was given serve both; what the second one samples is its own."""
    await engine.say("look", "edit", "test", "more", "even more", "last")
    await converse(adapter, opened, LISTED[:2])
    source = await opened.wait_delivered(3)
    (first,) = await fork(opened, source[1].id)
    assert await converse(adapter, first, LISTED[:2]) == ["look", "more", "even more"]
    rows = await first.wait_delivered(3)
    (second,) = await fork(first, rows[2].id, group_no=1)
    again = await next_attempt(second, 2)
    assert await converse(adapter, again, LISTED_LATER[:2]) == ["look", "more", "last"]
    assert await num_calls(engine) == 6
    async with opened.database.begin() as conn:
        (chain,) = build_chains(await turns.load_metas(conn, second.rollout_id, 2))
    last = (await again.wait_delivered(3))[2]
    assert chain.num_trained == last.num_sampled and last.attempt == 2


async def test_the_first_turn_can_be_forked(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "see")
    await converse(adapter, opened, [])
    (row,) = await opened.wait_delivered(1)
    (one,) = await fork(opened, row.id)
    assert await converse(adapter, one, []) == ["see"]


async def test_turns_are_named_by_their_numbers(adapter: str, engine: ScriptedEngine, opened: Opened) -> None:
    await engine.say("look", "edit")
    await converse(adapter, opened, LISTED[:1])
    rows = await opened.wait_delivered(2)
    async with opened.database.begin() as conn:
        assert await forks.turn_of_number(conn, opened.rollout_id, 2) == rows[1].id
        point = await forks.fork_point(conn, rows[1].id)
        assert (point.rollout_id, point.run_id, point.policy) == (opened.rollout_id, "run-1", None)
        for number in (0, 3):
            with pytest.raises(ConfigError, match=f"no turn {number}; it has turns 1 to 2"):
                await forks.turn_of_number(conn, opened.rollout_id, number)
        with pytest.raises(ConfigError, match="archived"):
            await forks.fork_point(conn, 10**9)
        assert not (await conn.execute(select(TurnTable.id).where(TurnTable.attempt == 0))).all()


@pytest.mark.parametrize(("number", "expected"), [(3, ["look", "edit", "new"]), (4, ["look", "edit", "test", "new"])])
async def test_a_turn_of_an_attempt_that_lost_its_box_is_behind_what_it_was_behind(
    adapter: str, engine: ScriptedEngine, opened: Opened, number: int, expected: list[str]
) -> None:
    """A later attempt was given the first turns, and got another result then; what it sampled is not in the fork."""
    await engine.say("look", "edit", "test", "done", "otherwise", "end", "new", "newer")
    await converse(adapter, opened, LISTED)
    source = await opened.wait_delivered(4)
    again = await next_attempt(opened, 2)
    assert await converse(adapter, again, [LISTED[0], "another result"]) == ["look", "edit", "otherwise"]
    (one,) = await fork(opened, source[number - 1].id)
    found = await converse(adapter, one, LISTED)
    assert found[: len(expected)] == ["end" if text == "new" else text for text in expected]
    async with opened.database.begin() as conn:
        (shown,) = await forks.forks_of(conn, opened.rollout_id)
        assert (shown.size, shown.num_whole) == (1, 1)


async def test_a_lost_box_does_not_move_the_turn_at_which_a_fork_begins(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    """Only one box has ended behind the copies."""
    await engine.say("look", "edit", "test", "fresh")
    await converse(adapter, opened, LISTED[:2])
    source = await opened.wait_delivered(3)
    (one,) = await fork(opened, source[2].id)
    assert await converse(adapter, one, []) == ["look"]
    again = await next_attempt(one, 2)
    assert await converse(adapter, again, LISTED[:2]) == ["look", "edit", "fresh"]
    third = await next_attempt(one, 3)
    assert await converse(adapter, third, LISTED[:1]) == ["look", "edit"]
    async with opened.database.begin() as conn:
        await conn.execute(update(RolloutTable).where(RolloutTable.id == one.rollout_id).values(attempt=3))
        (shown,) = await forks.forks_of(conn, opened.rollout_id)
        assert (shown.size, shown.num_whole) == (1, 1)
        times = await conn.execute(select(TurnTable.completed_at).where(TurnTable.worker == COPIED))
    assert not any(times.scalars()), "copies took no time"


async def test_a_run_is_not_pruned_while_forks_begin_with_its_turns(
    adapter: str, engine: ScriptedEngine, opened: Opened
) -> None:
    await engine.say("look")
    await converse(adapter, opened, [])
    (row,) = await opened.wait_delivered(1)
    values = {"config_digest": "", "config_name": "", "seed": 0, "model_path": ""}
    forked = {"evaluation": {"forked_turn_id": row.id}}
    async with opened.database.begin() as conn:
        await conn.execute(update(RunTable).where(RunTable.run_id == "run-1").values(state=RunState.DONE))
        await conn.execute(update(RolloutTable).values(outcome="cancelled"))
        assert await retention.may_prune(conn, "run-1", force=False)
        await conn.execute(insert(RunTable).values(**values, run_id="fork", config=forked))
        with pytest.raises(ConfigError, match="rollouts of run fork begin with its turns"):
            await retention.may_prune(conn, "run-1", force=False)
        await conn.execute(update(RunTable).values(state=RunState.DONE))
        assert await retention.may_prune(conn, "run-1", force=False)
