"""The token view shows what the learner saw of each trained token, and says why a token has no value."""

import asyncio
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sqlalchemy import delete, func, insert, select, update

from ratchet.token_statistics import TrainedTurn
from store.chains import read_chains
from store.database import Database
from store.schema import BatchItemTable, BatchTable
from store.token_statistics import read_trained_turns, record_trained_turns
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_planned_run, make_run
from tests.integration.viewer.filled_store import FilledRun
from training.rank_runtime import RankSettings

LEARNER_COLOURS = ("entropy", "ratio", "advantage")


async def read_page(client: httpx.AsyncClient, rollout_id: int, query: str = "") -> dict[str, Any]:
    answer = await client.get(f"/rollouts/{rollout_id}/tokens.json?{query}")
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


def tokens_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [token for run in page["runs"] for token in run["tokens"]]


async def test_values_of_a_real_step_are_those_of_the_model(
    client: httpx.AsyncClient, database: Database, run_id: str, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    await make_planned_run(database, run_id, make_config(training={"steps": 1}), model, tmp_path / "policies")
    settings = RankSettings(run_id, database.url, tmp_path / "policies", tmp_path / "checkpoints")
    await asyncio.to_thread(supervise, settings, 1, tmp_path / "ranks")
    members = (await client.get(f"/runs/{run_id}/steps/1.json")).json()["members"]
    assert sum(one["share"] for one in members) == pytest.approx(1) and len(members) > 2
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for member in members[:3]:
        rollout_id = member["rollout"]["id"]
        async with database.begin() as connection:
            chains = await read_chains(connection, [rollout_id])
        for chain in chains:
            page = await read_page(client, rollout_id, f"chain={chain.no}&colour=ratio")
            assert page["missing"] == "" and page["advantage"] == member["use"]["advantage"]
            tokens = tokens_of(page)
            assert [one["in_step"] for one in tokens] == chain.trained.tolist()
            ids = torch.from_numpy(chain.ids.astype(np.int64))
            with torch.no_grad():
                logits = plain(ids[None]).logits[0, :-1]
            entropies = torch.distributions.Categorical(logits=logits).entropy()
            for at in np.flatnonzero(chain.trained).tolist():
                logprob = float(logits[at - 1].log_softmax(-1)[ids[at]])
                assert tokens[at]["entropy"] == pytest.approx(float(entropies[at - 1]), rel=2e-3)
                assert tokens[at]["learner_logprob"] == pytest.approx(logprob, abs=2e-3)
                assert tokens[at]["ratio"] == pytest.approx(np.exp(logprob - float(chain.logprobs[at])), rel=2e-3)
                assert tokens[at]["advantage"] == member["use"]["advantage"]
            assert all(tokens[at]["entropy"] is None for at in np.flatnonzero(~chain.trained).tolist())


@pytest.mark.parametrize("colour", LEARNER_COLOURS)
async def test_colours_legend_and_values_agree(client: httpx.AsyncClient, filled: FilledRun, colour: str) -> None:
    page = await read_page(client, filled.solved, f"colour={colour}")
    tokens = tokens_of(page)
    shades = [one["shade"] for one in page["legend"]["entries"]]
    assert {one["shade"] for one in tokens} <= set(shades)
    assert {one["shade"] for one in tokens if not one["sampled"]} == {"context"}
    trained = [one for one in tokens if one["trained"]]
    assert all(one["in_step"] and one["advantage"] == 0.5 and one["entropy"] is not None for one in trained)
    of_ratio = colour == "ratio"
    assert all((one["shade"] == "unknown") == (of_ratio and one["ratio"] is None) for one in trained)
    assert sum(one["ratio"] is None for one in trained) == 3, "of each turn, one ratio is not finite"
    html = unescape((await client.get(f"/rollouts/{filled.solved}/tokens?colour={colour}")).text)
    assert page["legend"]["title"] in html and "not trained" in html


async def test_why_values_are_missing(client: httpx.AsyncClient, database: Database, filled: FilledRun) -> None:
    async def missing(rollout_id: int, shade: str) -> str:
        page = await read_page(client, rollout_id, "colour=entropy")
        assert {one["shade"] for one in tokens_of(page) if one["sampled"]} <= {shade}
        html = unescape((await client.get(f"/rollouts/{rollout_id}/tokens?colour=entropy")).text)
        assert not page["chains"] or page["missing"] in html
        return str(page["missing"])

    assert await missing(filled.rejected, "untrained") == "", "it has no tokens to say anything of"
    step = BatchTable.__table__.update().where(BatchTable.run_id == filled.run_id)
    async with database.begin() as connection:
        await record_trained_turns(connection, filled.run_id, 1, [])
    assert "older than the step's bound" in await missing(filled.solved, "unknown")
    async with database.begin() as connection:
        stepped = (await connection.execute(select(BatchTable.stepped_at))).scalar_one()
        await connection.execute(step.values(stepped_at=None, state="planned"))
    assert "is planned" in await missing(filled.solved, "untrained")
    async with database.begin() as connection:
        members = (await connection.execute(select(BatchTable.members))).scalar_one()
        none = [one | {"num_tokens": 0} for one in members]
        await connection.execute(step.values(stepped_at=stepped, members=none))
    assert "no token of this rollout" in await missing(filled.solved, "untrained")
    async with database.begin() as connection:
        await connection.execute(delete(BatchItemTable).where(BatchItemTable.run_id == filled.run_id))
    assert await missing(filled.solved, "untrained") == "No step has trained this rollout."


async def test_a_rollout_that_two_runs_have_trained(
    client: httpx.AsyncClient, database: Database, filled: FilledRun
) -> None:
    """The first step is shown, and the other one by `trained_by`; its plan leaves out older tokens."""
    other = "stored & another"
    await make_run(database, other, make_config())
    async with database.begin() as connection:
        plan = select(BatchTable).where(BatchTable.run_id == filled.run_id)
        row = dict((await connection.execute(plan)).one()._mapping) | {"run_id": other, "step": 4}
        row["members"] = [one | {"advantage": 2.0} for one in row["members"]]
        await connection.execute(insert(BatchTable).values(**row | {"stepped_at": func.now()}))
        item = {"run_id": other, "group_id": filled.trained_group, "step": 4, "use": "trained"}
        await connection.execute(insert(BatchItemTable).values(**item))
        (chain,) = await read_chains(connection, [filled.solved])
        turn = int(chain.turn_ids[chain.trained][0])
        (first,) = (await read_trained_turns(connection, filled.run_id, 1, [turn])).values()
        seen = TrainedTurn(turn, filled.solved, first.start, first.entropies + np.float16(1), first.log_ratios)
        await record_trained_turns(connection, other, 4, [seen])
    own = await read_page(client, filled.solved)
    assert [(one["run_id"], one["step"]) for one in own["trainings"]] == [(filled.run_id, 1), (other, 4)]
    assert own["training"] == own["trainings"][0] and own["advantage"] == 0.5
    html = (await client.get(f"/rollouts/{filled.solved}/tokens")).text
    assert "trained_by=stored%20%26%20another" in html
    theirs = await read_page(client, filled.solved, "trained_by=stored%20%26%20another&colour=entropy")
    assert theirs["training"]["step"] == 4 and theirs["advantage"] == 2.0
    of_turn = ([one for one in tokens_of(page) if one["turn_id"] == turn] for page in (own, theirs))
    before, after = ([one for one in tokens if one["trained"]] for tokens in of_turn)
    assert [one["entropy"] for one in after] == pytest.approx([one["entropy"] + 1 for one in before], abs=2e-3)
    rest = [one for one in tokens_of(theirs) if one["turn_id"] != turn and one["trained"]]
    assert {one["shade"] for one in rest} == {"unknown"}
    async with database.begin() as connection:
        stale = update(BatchTable).where(BatchTable.run_id == other)
        await connection.execute(stale.values(knobs={"min_policy_step": 1, "updates_per_step": 1, "loss": {}}))
    theirs = await read_page(client, filled.solved, "trained_by=stored%20%26%20another&colour=advantage")
    assert {one["shade"] for one in tokens_of(theirs) if one["sampled"]} == {"untrained"}, "older than the bound"
    assert (await client.get(f"/rollouts/{filled.solved}/tokens?trained_by=nobody")).status_code == 404


async def test_an_unknown_colour_is_refused(client: httpx.AsyncClient, filled: FilledRun) -> None:
    answer = await client.get(f"/rollouts/{filled.solved}/tokens?colour=red")
    assert answer.status_code == 422 and "entropy" in answer.text
