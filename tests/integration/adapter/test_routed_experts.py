"""The experts that an engine chose are stored once per token, and each token of a chain gets its own back."""

from typing import Any

import numpy as np
import pytest

from adapter.turns.loss_mask import build_chains
from store import chains, turns
from store.arrays import experts_from_bytes
from store.database import Database
from tests.integration.adapter.conftest import Opened, ScriptedEngine
from tests.integration.adapter.test_durability import ask
from tests.standins.engine import experts_of
from training.planner import load_sequences


async def say(engine: ScriptedEngine, *texts: str, experts: bool = True) -> None:
    await engine.script(*({"ids": engine.ids(one), "experts": experts} for one in texts))


async def read(database: Database, opened: Opened) -> list[chains.ChainArrays]:
    """Build the chains of the rollout, and return them with their experts."""
    async with database.begin() as connection:
        built = build_chains(await turns.load_metas(connection, opened.rollout_id, 1))
        await chains.replace_chains(connection, opened.rollout_id, built)
        return await chains.read_chains(connection, [opened.rollout_id], trained_only=False, with_experts=True)


@pytest.fixture
async def forked(adapter: str, engine: ScriptedEngine, database: Database, opened: Opened) -> list[chains.ChainArrays]:
    """A conversation of three turns. Then the client shows the policy the first answer without its end, so that a
    second chain forks inside of that answer.
    """
    await say(engine, "one and a half", "two", "three", "another two")
    history: list[Any] = [{"role": "user", "content": "fix the thing"}]
    for question in ("go on", "and now?", ""):
        answer = (await ask(adapter, opened.token, messages=history)).json()["choices"][0]["message"]
        history = [*history, answer, {"role": "user", "content": question}]
    shortened = {"role": "assistant", "content": "one and"}
    await ask(adapter, opened.token, messages=[history[0], shortened, {"role": "user", "content": "go on"}])
    await opened.wait_delivered(4)
    return await read(database, opened)


async def test_a_turn_stores_the_experts_of_its_own_tokens(forked: list[chains.ChainArrays], opened: Opened) -> None:
    """And of the last one that it keeps, which no turn before it has computed."""
    rows = await opened.turns()
    assert [row.kept_tokens > 0 for row in rows] == [False, True, True, True]
    for row in rows:
        stored = experts_from_bytes(row.routed_experts)
        assert stored.dtype == np.uint8 and stored.shape[1:] == (3, 2)
        assert len(stored) == len(row.suffix_ids) // 4 + row.num_sampled - (row.kept_tokens == 0)


async def test_every_token_of_a_chain_has_its_experts(forked: list[chains.ChainArrays], opened: Opened) -> None:
    rows = await opened.turns()
    assert len(forked) == 2 and 0 < rows[3].kept_tokens < len(rows[0].suffix_ids) // 4 + rows[0].num_sampled
    for chain in forked:
        assert chain.experts is not None and chain.experts.known.tolist() == [True] * (len(chain.ids) - 1) + [False]
        assert (chain.experts.ids[:-1] == experts_of(chain.ids[:-1])).all(), "the last token was not computed"


async def test_turns_without_experts_leave_their_tokens_to_the_learner(
    adapter: str, engine: ScriptedEngine, database: Database, opened: Opened
) -> None:
    """The engine of the second turn returns none, and that of the third does again."""
    history: list[Any] = [{"role": "user", "content": "fix the thing"}]
    for text, experts in (("one", True), ("two", False), ("three", True)):
        await say(engine, text, experts=experts)
        answer = (await ask(adapter, opened.token, messages=history)).json()["choices"][0]["message"]
        history = [*history, answer, {"role": "user", "content": "go on"}]
    _, second, third = await opened.wait_delivered(3)
    (chain,) = await read(database, opened)
    assert chain.experts is not None and second.routed_experts is None
    known = chain.experts.known
    begins, ends = second.kept_tokens, third.kept_tokens
    assert known[: begins - 1].all() and not known[begins - 1 : ends - 1].any() and known[ends - 1 : -1].all()
    async with database.begin() as connection:
        (sequence,) = await load_sequences(connection, [opened.rollout_id], -1, with_experts=True)
        (plain,) = await load_sequences(connection, [opened.rollout_id], -1)
    assert sequence.experts is not None and plain.experts is None
    assert sequence.experts.known.tolist() == known[: len(sequence.ids)].tolist()
