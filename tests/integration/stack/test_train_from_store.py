"""Training on the rollouts that another run left in the store: the same data, the same guarantees, no rollouts."""

import asyncio
import shutil
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from ratchet.config import RunConfig
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import ConfigError
from ratchet.stored_config import config_digest
from stack import train_from_store
from stack.parts import Stack
from store import engines, learners, open_runs, runs
from store.database import Database
from store.schema import BatchItemTable, BatchTable, MetricTable, RolloutGroupTable, RolloutTable, RunTable
from tests.integration.training.ranks import supervise
from tests.integration.training.records import make_config, make_group, make_planned_run, make_run
from tests.standins.tiny_model import make_tokenizer, make_weights
from training.rank_runtime import RankSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    return tmp_path


def settings_of(database: Database, run_id: str, home: Path) -> RankSettings:
    return RankSettings(run_id, database.url, home / "policies", home / "checkpoints")


async def losses(database: Database, run_id: str) -> list[float]:
    query = (
        select(MetricTable.value)
        .where(MetricTable.run_id == run_id, MetricTable.name == "loss")
        .order_by(MetricTable.step)
    )
    async with database.begin() as connection:
        return list((await connection.execute(query)).scalars())


def over(config: RunConfig, model: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({**config.model_dump(mode="json"), "model": str(model), **changes})


@pytest.mark.parametrize("begins_there", [False, True])
async def test_the_same_config_trains_the_same_weights_whatever_dies(
    database: Database, model: Path, home: Path, begins_there: bool
) -> None:
    """The weights equal, bit by bit, those of the run that made the rollouts; its rows stay unchanged, and the new run
    is not taken for that run's continuation.
    """
    config = make_config(training={"steps": 4})
    source, run_id = f"source-{uuid.uuid4().hex[:8]}", f"stored-{uuid.uuid4().hex[:8]}"
    await make_planned_run(database, source, config, model, home / "policies")
    await asyncio.to_thread(supervise, settings_of(database, source, home), 1, home / source)

    begins = {"init_from": f"{source}@0"} if begins_there else {}
    same = over(config, model, training=config.training.model_dump() | {"steps": 99}, **begins)
    assert await train_from_store.create_stored_run(database, run_id, source, same, "x") == 4
    async with database.begin() as connection:
        assert run_id in await learners.runs_wanting_learner(connection)
        assert run_id not in await open_runs.unfinished_runs(connection), "no workflow is started for it"
        assert run_id not in {
            one.version.partition("/")[0] for one in await engines.newest_published_policies(connection, DEFAULT_SET)
        }
    kills = [("plan", 1, 0), ("step", 2, 0), ("publish", 3, 0), ("save", 4, 0), ("commit", 4, 0)]
    assert await asyncio.to_thread(supervise, settings_of(database, run_id, home), 1, home / run_id, kills) == 6

    row = await asyncio.wait_for(train_from_store.watch_stored_run(database, run_id, lambda line: None), 60)
    assert (row.state, row.step, row.source_run_id) == ("done", 4, source)
    assert row.epoch == 5, "done with the last commit: who came after that kill had nothing to take"
    assert await losses(database, run_id) == await losses(database, source)
    async with database.begin() as connection:
        last = [await runs.newest_version(connection, one) for one in (source, run_id)]
        items = list(
            (await connection.execute(select(BatchItemTable.group_id).where(BatchItemTable.run_id == run_id))).scalars()
        )
        names = set((await connection.execute(select(MetricTable.name).where(MetricTable.run_id == run_id))).scalars())
        assert (
            await connection.execute(
                select(func.count()).select_from(RolloutTable).where(RolloutTable.run_id == run_id)
            )
        ).scalar_one() == 0
    assert last[0] is not None and last[1] is not None
    weights = [[file["sha256"] for file in one.files if file["name"].endswith(".safetensors")] for one in last if one]
    assert weights[0] == weights[1]
    assert len(items) == len(set(items)) == 4 * config.training.groups_per_step
    assert "mismatch_kl" in names and "staleness_mean" not in names, "no version of this run sampled anything"


async def test_another_loss_on_the_same_groups(database: Database, model: Path, home: Path, run_id: str) -> None:
    """Groups without signal are consumed, too few groups for a last full step make a smaller one, the source keeps its
    states.
    """
    config = make_config(training={"steps": 6})
    await make_run(database, run_id, config, model, home / "policies")
    async with database.begin() as connection:
        for number, rewards in enumerate([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]):
            await make_group(connection, run_id, number, rewards, step=3 * number)
    sft = over(config, model, loss={"preset": "sft"}, training=config.training.model_dump() | {"max_staleness": 0})
    for name, chosen in (("a", over(config, model)), ("b", sft)):
        assert await train_from_store.create_stored_run(database, run_id + name, run_id, chosen, "x") == 2
    async with database.begin() as connection:
        uses = {}
        for name in "ab":
            query = select(RolloutGroupTable.group_no, BatchItemTable.step, BatchItemTable.use).join(
                BatchItemTable, BatchItemTable.group_id == RolloutGroupTable.id
            )
            uses[name] = {
                row[0]: (row[1], row[2])
                for row in await connection.execute(query.where(BatchItemTable.run_id == run_id + name))
            }
        states = list(
            (
                await connection.execute(select(RolloutGroupTable.state).where(RolloutGroupTable.run_id == run_id))
            ).scalars()
        )
        members = (
            (
                await connection.execute(
                    select(BatchTable.members).where(BatchTable.run_id == run_id + "b").order_by(BatchTable.step)
                )
            )
            .scalars()
            .all()
        )
        planned = (
            await connection.execute(select(RunTable.config).where(RunTable.run_id == run_id + "b"))
        ).scalar_one()
        assert await runs.newest_unfinished_run(connection, sft, run_id) == run_id + "b"
        assert await runs.newest_unfinished_run(connection, sft) is None
    assert (
        uses["a"]
        == uses["b"]
        == {0: (1, "trained"), 1: (1, "no_signal"), 2: (1, "trained"), 3: (2, "trained"), 4: (2, "no_signal")}
    )
    assert states == ["ready"] * 5
    assert [[one["num_tokens"] > 0 for one in step] for step in members] == [[True, False, False, True], [True, False]]
    assert planned["training"]["steps"] == 2


async def test_the_command_s_half(
    database: Database, model: Path, home: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ratchet train --from-store` without the stack: a run is made once, found again, followed to its end and read
    back.
    """
    monkeypatch.setenv("RATCHET_DATABASE_URL", database.url)
    config = make_config(training={"steps": 2})
    await make_run(database, run_id, config, model, home / "policies")
    async with database.begin() as connection:
        for number in range(4):
            await make_group(connection, run_id, number, [1.0, 0.0])
    said: list[str] = []
    stack, chosen = Stack(), over(config, model)
    begun = await train_from_store.start_stored_run(stack, chosen, "mine", run_id, False, said.append)
    assert await train_from_store.start_stored_run(stack, chosen, "mine", run_id, False, said.append) == begun
    assert await train_from_store.start_stored_run(stack, chosen, "mine", run_id, True, said.append) != begun
    following = asyncio.create_task(train_from_store.follow_stored_run(stack, begun, said.append))
    await asyncio.to_thread(supervise, settings_of(database, begun, home), 1, home / begun)
    result = await asyncio.wait_for(following, 60)
    assert (result["run_id"], result["state"], result["summary"]) == (begun, "done", None)
    assert [step["metrics"]["groups_trained"] for step in result["steps"]] == [2, 2]
    assert "2 steps on the stored groups" in said[0] and "continuing run" in said[1]


async def test_a_rollout_by_hand_is_no_run_to_continue(database: Database, run_id: str) -> None:
    config = make_config(seed=uuid.uuid4().int % 2**31)
    by_hand = runs.NewRun(
        run_id=f"{runs.ADHOC}-{run_id}",
        config=config.model_dump(mode="json"),
        config_digest=config_digest(config),
        config_name=runs.ADHOC,
        seed=config.seed,
        model_path="",
    )
    async with database.begin() as connection:
        await runs.create_run(connection, by_hand)
        assert await runs.newest_unfinished_run(connection, config) is None
        await runs.create_run(connection, replace(by_hand, run_id=run_id, config_name="test"))
        assert await runs.newest_unfinished_run(connection, config) == run_id


async def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(
    database: Database, model: Path, home: Path, run_id: str
) -> None:
    config = make_config()
    await make_run(database, run_id, config, model, home / "policies")
    with pytest.raises(ConfigError, match="run 'nobody' does not exist"):
        await train_from_store.create_stored_run(database, run_id + "x", "nobody", over(config, model), "x")
    with pytest.raises(ConfigError, match="has no group to train on"):
        await train_from_store.create_stored_run(database, run_id + "x", run_id, over(config, model), "x")
    other = home / "other"
    shutil.copytree(model, other)
    make_tokenizer(other, vocab_size=420)
    make_weights(other)
    async with database.begin() as connection:
        await make_group(connection, run_id, 0, [1.0, 0.0])
    with pytest.raises(ConfigError, match="another tokenizer"):
        await train_from_store.create_stored_run(database, run_id + "x", run_id, over(config, other), "x")
    async with database.begin() as connection:
        assert await runs.get_run(connection, run_id + "x") is None
