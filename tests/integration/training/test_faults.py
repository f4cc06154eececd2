"""The learner under kills: the weights equal those of the undisturbed run, and every group is trained once."""

import asyncio
import itertools
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import pytest
from sqlalchemy import cast, delete, select, update
from sqlalchemy.dialects.postgresql import JSONB

from ratchet.config import RunConfig
from ratchet.errors import ConfigError
from reads.curves import metrics_by_step
from reads.explanations import explain_thing
from store import evaluations, learner_commits, learners, metrics, runs, steering
from store.arrays import halves_from_bytes, logprobs_to_bytes
from store.database import Database
from store.evaluations import NewEvaluation
from store.learners import LearnerRow
from store.schema import (
    BatchItemTable,
    BatchTable,
    CheckpointTable,
    LearnerTable,
    PolicyVersionTable,
    RolloutGroupTable,
    RolloutTable,
    RunTable,
    SteeringTable,
    TrainedTurnTable,
    TurnTable,
)
from store.steering import Request, SteeringAnswer
from tests.integration.training.ranks import Group, Kill, supervise
from tests.integration.training.records import make_config, make_planned_run, states
from tests.integration.workflows.test_foreign_boxes import copy_of
from training import planner
from training.rank_runtime import RankSettings

POINTS = ("plan", "step", "write", "publish", "save", "commit")
_UNDISTURBED: "dict[tuple[int, str], Trained]" = {}
"""By world size and config."""


@dataclass(frozen=True)
class Trained:
    """The result of a run that no fault has disturbed.

    `digest`: sha256 of the last step's weights. `seen`: what the learner saw of each trained turn. `losses`: by step.
    """

    digest: str
    seen: list[tuple[int, int, bytes, bytes]]
    losses: list[float]


class Runs:
    """Runs that differ in their ids only, each trained by its own ranks."""

    def __init__(self, database: Database, model: Path, home: Path, config: RunConfig) -> None:
        self.database = database
        self.model = model
        self.home = home
        self.config = config

    async def make(self) -> RankSettings:
        run_id = f"fault-{uuid.uuid4().hex[:8]}"
        await make_planned_run(self.database, run_id, self.config, self.model, self.home / "policies")
        return RankSettings(run_id, self.database.url, self.home / "policies", self.home / "checkpoints")

    async def train(self, settings: RankSettings, world_size: int, kills: list[Kill]) -> int:
        return await asyncio.to_thread(supervise, settings, world_size, self.home / settings.run_id, kills)

    async def undisturbed(self, world_size: int) -> Trained:
        """Return the result of a run without faults, which is trained once for all tests with the same config."""
        key = world_size, self.config.model_dump_json()
        if key not in _UNDISTURBED:
            settings = await self.make()
            assert await self.train(settings, world_size, []) == 1
            await self.assert_trained_once(settings)
            _UNDISTURBED[key] = Trained(
                await self.digest(settings), await self.seen(settings), await self.losses(settings)
            )
        return _UNDISTURBED[key]

    async def losses(self, settings: RankSettings) -> list[float]:
        async with self.database.begin() as connection:
            found = await metrics_by_step(connection, settings.run_id, 0, 100)
        return [found[step]["loss"] for step in sorted(found)]

    async def digest(self, settings: RankSettings) -> str:
        """Return the sha256 of the last step's weights."""
        async with self.database.begin() as connection:
            version = await runs.newest_version(connection, settings.run_id)
        assert version is not None and version.step == self.config.training.steps
        return str(next(file["sha256"] for file in version.files if file["name"] == "model.safetensors"))

    async def assert_trained_once(self, settings: RankSettings) -> None:
        async with self.database.begin() as connection:
            items = (
                (
                    await connection.execute(
                        select(BatchItemTable.group_id).where(BatchItemTable.run_id == settings.run_id)
                    )
                )
                .scalars()
                .all()
            )
            row = await runs.get_run(connection, settings.run_id)
        assert row is not None and row.checkpoint_step == self.config.training.steps
        assert set(await states(self.database, settings.run_id)) == {"committed"}
        assert len(items) == len(set(items)) == self.config.training.steps * self.config.training.groups_per_step

    async def seen(self, settings: RankSettings) -> list[tuple[int, int, bytes, bytes]]:
        """Return what the learner saw of each trained turn, in the order of steps and turns, without their ids."""
        table, mine = TrainedTurnTable, TrainedTurnTable.run_id == settings.run_id
        columns = select(table.step, table.start, table.entropies, table.log_ratios).where(mine)
        async with self.database.begin() as connection:
            found = [tuple(row) for row in await connection.execute(columns.order_by(table.step, table.turn_id))]
            plans = select(BatchTable.members).where(BatchTable.run_id == settings.run_id)
            members = itertools.chain.from_iterable((await connection.execute(plans)).scalars())
        assert sum(len(halves_from_bytes(row[2])) for row in found) == sum(one["num_tokens"] for one in members)
        return found


@pytest.fixture
def equal_runs(database: Database, model: Path, tmp_path: Path) -> Runs:
    return Runs(database, model, tmp_path, make_config(training={"steps": 8, "warmup_steps": 4, "weight_decay": 0.1}))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_kills_at_every_point_change_nothing(equal_runs: Runs, world_size: int) -> None:
    undisturbed, killed = await equal_runs.undisturbed(world_size), await equal_runs.make()
    # Each point on each rank, in a step of its own; save and commit exist in steps with a checkpoint only.
    first_save = POINTS.index("save")
    kills = [
        (point, 2 * (2 * (number - first_save) + rank) + 2 if number >= first_save else 1 + 2 * number + rank, rank)
        for (number, point), rank in itertools.product(enumerate(POINTS), range(world_size))
    ]
    assert await equal_runs.train(killed, world_size, kills) > len(kills) // 2
    assert all((equal_runs.home / killed.run_id / f"{point}.{step}.{rank}").exists() for point, step, rank in kills)
    assert await equal_runs.digest(killed) == undisturbed.digest
    assert await equal_runs.seen(killed) == undisturbed.seen, "each trained token is recorded once"
    await equal_runs.assert_trained_once(killed)
    left = sorted(path.name.split(".")[0] for path in (killed.checkpoints / killed.run_id).iterdir())
    assert left == ["step6", "step8"], "old checkpoints are deleted, also those of killed learners"
    published = {int(path.name.split(".")[0]) for path in (killed.policies / killed.run_id).iterdir()}
    # Kept: the first, the newest four, and those of the checkpoints at the time of the last publish.
    assert {0, 5, 6, 7, 8} <= published <= {0, 2, 4, 5, 6, 7, 8}, (
        "old weights are deleted, also those that were never published"
    )
    async with equal_runs.database.begin() as connection:
        learner = await learners.get_learner(connection, killed.run_id)
    assert learner is not None and set(learner.details) == {"pid"}, (
        "ranks that lost a killed peer are not counted as failed"
    )
    names = [path.name for path in (killed.policies / killed.run_id).iterdir()]
    assert len(names) == len(published), "one version per step: the last, if a replay has published it again"


async def test_one_rank_continues_a_checkpoint_of_two(equal_runs: Runs) -> None:
    """The training is the same, but not bit by bit: sums have another order."""
    settings, alone = await equal_runs.make(), await equal_runs.undisturbed(1)
    codes = await asyncio.to_thread(Group(settings, 2, equal_runs.home / "two", [("commit", 4, 0)]).wait)
    assert any(codes)
    await equal_runs.train(settings, 1, [])
    await equal_runs.assert_trained_once(settings)
    assert await equal_runs.losses(settings) == pytest.approx(alone.losses, rel=1e-3, abs=1e-5)


async def test_a_replaced_learner_leaves_no_trace(equal_runs: Runs) -> None:
    """A second learner takes over while the first is stopped. When the first resumes, its writes match no row."""
    settings, undisturbed = await equal_runs.make(), await equal_runs.undisturbed(1)
    zombie = Group(settings, 1, equal_runs.home / "zombie", stops=[("step", 3, 0)])
    await asyncio.to_thread(zombie.wait_until_stopped)
    await equal_runs.train(settings, 1, [])
    zombie.resume()
    assert await asyncio.to_thread(zombie.wait) == [0]
    await equal_runs.assert_trained_once(settings)
    assert await equal_runs.digest(settings) == undisturbed.digest
    async with equal_runs.database.begin() as connection:
        epoch = (
            await connection.execute(select(RunTable.epoch).where(RunTable.run_id == settings.run_id))
        ).scalar_one()
        query = select(PolicyVersionTable.step, PolicyVersionTable.epoch).where(
            PolicyVersionTable.run_id == settings.run_id
        )
        versions = {(row[0], row[1]) for row in await connection.execute(query)}
        saved = select(CheckpointTable.epoch).where(CheckpointTable.run_id == settings.run_id, CheckpointTable.step > 2)
        assert set((await connection.execute(saved)).scalars()) == {epoch} == {2}
        said = (
            await connection.execute(select(LearnerTable.epoch).where(LearnerTable.run_id == settings.run_id))
        ).scalar_one()
        committed = select(CheckpointTable.step).where(
            CheckpointTable.run_id == settings.run_id, CheckpointTable.epoch == 1
        )
        first = max((await connection.execute(committed)).scalars(), default=0)
    assert said == 2
    # Whether the first had committed its checkpoint when it was stopped depends on how fast it was written.
    assert versions == {(0, 0), (1, 1), (2, 1), *((step, 2) for step in range(first + 1, 9))}
    assert not (settings.policies / settings.run_id / "3.e1").exists()


async def test_a_store_that_is_older_than_the_files_names_none_of_them_again(equal_runs: Runs) -> None:
    """Engines may still serve a version of the steps that the store has lost, by its name."""
    settings, undisturbed = await equal_runs.make(), await equal_runs.undisturbed(1)
    async with copy_of(equal_runs.database) as older:
        await equal_runs.train(settings, 1, [])
        again = Runs(older, equal_runs.model, equal_runs.home / "again", equal_runs.config)
        restored = replace(settings, database_url=older.url)
        await again.train(restored, 1, [])
        assert await again.digest(restored) == undisturbed.digest
        await again.assert_trained_once(restored)
        async with older.begin() as connection:
            columns = select(PolicyVersionTable.epoch).where(
                PolicyVersionTable.run_id == settings.run_id, PolicyVersionTable.step > 0
            )
            assert set((await connection.execute(columns)).scalars()) == {2}


async def test_a_replaced_learner_deletes_nothing_of_its_successor(equal_runs: Runs) -> None:
    """It was stopped between its commit and its deletions, so its list of checkpoints to keep is outdated."""
    settings = await equal_runs.make()
    zombie = Group(settings, 1, equal_runs.home / "zombie", stops=[("commit", 4, 0)])
    await asyncio.to_thread(zombie.wait_until_stopped)
    await equal_runs.train(settings, 1, [])
    kept = {path.name for path in (settings.checkpoints / settings.run_id).iterdir()}
    zombie.resume()
    assert await asyncio.to_thread(zombie.wait) == [0]
    assert (
        {path.name for path in (settings.checkpoints / settings.run_id).iterdir()} == kept == {"step6.e2", "step8.e2"}
    )
    async with equal_runs.database.begin() as connection:
        pointer = (
            await connection.execute(select(RunTable.checkpoint_uri).where(RunTable.run_id == settings.run_id))
        ).scalar_one()
    assert (Path(pointer) / ".metadata").exists()


async def test_a_version_is_replaced_after_its_evaluation_also_by_the_next_learner(equal_runs: Runs) -> None:
    settings, undisturbed = await equal_runs.make(), await equal_runs.undisturbed(1)
    values = {"step": 2, "temperature": 1.0, "num_samples": 1, "policy_version": f"{settings.run_id}@2.0"}
    async with equal_runs.database.begin() as connection:
        await evaluations.begin_evaluation(connection, NewEvaluation(settings.run_id, "step2-t1", **values))

    async def waits() -> LearnerRow:
        async with asyncio.timeout(120):
            while True:
                await asyncio.sleep(0.2)
                async with equal_runs.database.begin() as connection:
                    learner = await learners.get_learner(connection, settings.run_id)
                    newest = await runs.newest_version(connection, settings.run_id)
                assert newest is not None and newest.step <= 2
                if learner is not None and learner.phase == learners.EVALUATED:
                    return learner

    first = Group(settings, 1, equal_runs.home / "first")
    while (await waits()).step < 3:
        await asyncio.sleep(0.1)
    epoch = (await waits()).epoch
    first.kill()  # perhaps before its checkpoint is committed; the next learner then waits at an earlier step
    async with equal_runs.database.begin() as connection:  # is never ended
        values = values | {"step": 1, "policy_version": f"{settings.run_id}@1.0"}
        await evaluations.begin_evaluation(connection, NewEvaluation(settings.run_id, "step1-t1", **values))
    training = asyncio.create_task(equal_runs.train(settings, 1, []))
    while (await waits()).epoch == epoch:
        await asyncio.sleep(0.1)
    async with equal_runs.database.begin() as connection:
        await evaluations.end_evaluation(connection, settings.run_id, "step2-t1")
    await training
    await equal_runs.assert_trained_once(settings)
    assert await equal_runs.digest(settings) == undisturbed.digest


async def _break_logprobs(equal_runs: Runs, settings: RankSettings, first: int, last: int) -> None:
    """Make the recorded logprobs of some steps' rollouts NaN, as an engine with a damaged card would."""
    async with equal_runs.database.begin() as connection:
        in_steps = BatchItemTable.step.between(first, last)
        groups = await connection.execute(
            select(BatchItemTable.group_id).where(BatchItemTable.run_id == settings.run_id, in_steps)
        )
        broken = logprobs_to_bytes([float("nan")] * 15)
        hit = select(RolloutTable.id).where(RolloutTable.group_id.in_(list(groups.scalars())))
        await connection.execute(update(TurnTable).where(TurnTable.rollout_id.in_(hit)).values(logprobs=broken))


async def test_infinite_gradients_are_skipped_and_too_many_in_a_row_pause_the_run(equal_runs: Runs) -> None:
    """Published weights and the batch stay, the run has the reason, and no learner starts until a person resumes it."""
    settings = await equal_runs.make()
    await _break_logprobs(equal_runs, settings, first=2, last=5)
    assert await equal_runs.train(settings, 2, []) == 1
    async with equal_runs.database.begin() as connection:
        row = (
            await connection.execute(
                select(RunTable.state, RunTable.state_reason, RunTable.step).where(RunTable.run_id == settings.run_id)
            )
        ).one()
        assert settings.run_id not in await learners.runs_wanting_learner(connection)
        newest = await runs.newest_version(connection, settings.run_id)
        values = await metrics_by_step(connection, settings.run_id, 0, 100)
    assert row.state == "paused" and "step 5" in row.state_reason and "not finite" in row.state_reason
    assert newest is not None and newest.step == row.step == 4
    assert {step: found["skipped_updates"] for step, found in values.items()} == {1: 0, 2: 1, 3: 1, 4: 1}
    assert all(isfinite(value) for found in values.values() for value in found.values())
    assert (await states(equal_runs.database, settings.run_id))[4] == "planned"


async def test_skipped_steps_with_a_good_one_between_them_do_not_end_training(equal_runs: Runs) -> None:
    settings = await equal_runs.make()
    await _break_logprobs(equal_runs, settings, first=1, last=3)
    await _break_logprobs(equal_runs, settings, first=5, last=6)
    await equal_runs.train(settings, 1, [])
    async with equal_runs.database.begin() as connection:
        values = await metrics_by_step(connection, settings.run_id, 0, 100)
        query = select(PolicyVersionTable.files).where(
            PolicyVersionTable.run_id == settings.run_id, PolicyVersionTable.step.between(1, 3)
        )
        files = [file for found in (await connection.execute(query)).scalars() for file in found]
    assert [values[step]["skipped_updates"] for step in range(1, 9)] == [1, 1, 1, 0, 1, 1, 0, 0]
    digests = {file["sha256"] for file in files if file["name"] == "model.safetensors"}
    assert len(digests) == 1, "no skipped update changed the weights"
    await equal_runs.assert_trained_once(settings)


def broken_loss(tokens: object, config: object) -> object:
    raise TypeError("a user's own mistake")


async def _paused(equal_runs: Runs, settings: RankSettings, world_size: int) -> str:
    """Return the reason of the pause, after three learners that failed and one that found the run paused."""
    codes = [
        any(await asyncio.to_thread(Group(settings, world_size, equal_runs.home / settings.run_id).wait))
        for _ in range(4)
    ]
    assert codes == [True, True, True, False]
    async with equal_runs.database.begin() as connection:
        row = await runs.get_run(connection, settings.run_id)
        assert settings.run_id not in await learners.runs_wanting_learner(connection)
    assert row is not None and row.state == "paused"
    return row.state_reason


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_an_error_of_the_users_own_code_pauses_the_run(equal_runs: Runs, world_size: int) -> None:
    """A failed learner counts once for any number of ranks."""
    equal_runs.config = make_config(loss={"preset": f"{__name__}:broken_loss"})
    reason = await _paused(equal_runs, await equal_runs.make(), world_size)
    assert reason == "the learner failed 3 times: TypeError: a user's own mistake"


async def test_a_checkpoint_that_cannot_be_written_pauses_the_run(equal_runs: Runs) -> None:
    settings = await equal_runs.make()
    settings.checkpoints.write_text("no directory")
    reason = await _paused(equal_runs, settings, 1)
    assert "the checkpoint could not be written (rank 0): [Errno 20] Not a directory" in reason
    assert (await states(equal_runs.database, settings.run_id))[:2] == ["stepped", "stepped"], "nothing is consumed"


async def test_failures_count_between_two_checkpoints(equal_runs: Runs) -> None:
    """A new checkpoint starts the count again."""
    settings = await equal_runs.make()
    async with equal_runs.database.begin() as connection:
        for epoch, (committed, count) in enumerate([(0, 1), (0, 2), (2, 1), (2, 2)], start=1):
            lease = await learner_commits.take_lease(connection, settings.run_id)
            await connection.execute(
                update(RunTable).where(RunTable.run_id == settings.run_id).values(checkpoint_step=committed)
            )
            for _ in range(2):  # of two ranks
                await learner_commits.fail_run(connection, lease, 2, "why")
            learner = await learners.get_learner(connection, settings.run_id)
            assert learner is not None and learner.details == {
                "failures": {"step": committed, "epoch": epoch, "count": count}
            }
            await learners.heartbeat_learner(connection, settings.run_id, epoch, 2, "done", 0, {})
        row = await runs.get_run(connection, settings.run_id)
    assert row is not None and row.state == "running"


async def test_a_run_that_ends_ends_its_learner(equal_runs: Runs) -> None:
    settings = await equal_runs.make()
    async with equal_runs.database.begin() as connection:
        await connection.execute(delete(BatchTable).where(BatchTable.run_id == settings.run_id))
    group = Group(settings, 2, equal_runs.home / "ended")
    while True:
        async with equal_runs.database.begin() as connection:
            learner = await learners.get_learner(connection, settings.run_id)
        if learner is not None and learner.phase == "waiting for a plan":
            break
        await asyncio.sleep(0.05)
    async with equal_runs.database.begin() as connection:
        await connection.execute(update(RunTable).where(RunTable.run_id == settings.run_id).values(state="cancelled"))
    assert await asyncio.to_thread(group.wait) == [0, 0]


NEVER_EXITS = """
import atexit
import json
import time

class NeverExits:
    def __init__(self, run, options):
        atexit.register(time.sleep, 10**6)
        run.directory.mkdir(parents=True)
        (run.directory / "config.json").write_text(json.dumps(dict(run.config)))

    def write(self, step, metrics):
        pass

    def close(self):
        pass
"""


async def test_torchrun_trains_the_same_weights(equal_runs: Runs) -> None:
    """Two ranks under torchrun train the same weights, bit by bit, and write TensorBoard events.

    A sink that would hold up the end of its process does not, and it gets no secret of the config."""
    settings, undisturbed = await equal_runs.make(), await equal_runs.undisturbed(2)
    home = equal_runs.home / "torchrun"
    (home / "policies").mkdir(parents=True)
    (home / "never_exits.py").write_text(NEVER_EXITS)
    sinks = {"sinks": [{"name": "tensorboard"}, {"name": "never_exits:NeverExits", "options": {"key": "secret"}}]}
    async with equal_runs.database.begin() as connection:
        config = RunTable.config.op("||")(cast({"metrics": sinks, "harness": {"extra_env": {"K": "secret"}}}, JSONB))
        await connection.execute(update(RunTable).where(RunTable.run_id == settings.run_id).values(config=config))
    environment = {**os.environ, "RATCHET_HOME": str(home), "RATCHET_DATABASE_URL": settings.database_url}
    environment["PYTHONPATH"] = str(home)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "training.torchrun",
        settings.run_id,
    ]
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    async with asyncio.timeout(500):
        assert await process.wait() == 0
    await equal_runs.assert_trained_once(settings)
    assert await equal_runs.digest(settings) == undisturbed.digest
    assert list((home / "tensorboard" / settings.run_id).glob("events.out.tfevents.*"))
    uploaded = (home / "neverexits" / "config.json").read_text()
    assert '"K": "***"' in uploaded and "secret" not in uploaded


async def test_a_changed_learning_rate_replays_bit_by_bit(equal_runs: Runs) -> None:
    """It is in the plan rows, so a learner that is killed later trains the same, also within the warm-up."""
    undisturbed, killed = await equal_runs.make(), await equal_runs.make()
    for settings in (undisturbed, killed):
        async with equal_runs.database.begin() as connection:
            for step, rate in ((3, 3e-4), (6, 2e-3), (7, 2e-3), (8, 2e-3)):
                row = (BatchTable.run_id == settings.run_id) & (BatchTable.step == step)
                knobs = BatchTable.knobs.op("||")({"learning_rate": rate})
                await connection.execute(update(BatchTable).where(row).values(knobs=knobs))
    await equal_runs.train(undisturbed, 1, [])
    assert await equal_runs.train(killed, 1, [("step", 3, 0), ("publish", 4, 0), ("step", 7, 0), ("save", 8, 0)]) == 5
    assert await equal_runs.digest(killed) == await equal_runs.digest(undisturbed)
    async with equal_runs.database.begin() as connection:
        found = await metrics_by_step(connection, killed.run_id, 0, 100)
    rates = [round(found[step]["learning_rate"], 9) for step in range(1, 9)]
    assert rates == [2.5e-4, 5e-4, 2.25e-4, 1e-3, 1e-3, 2e-3, 2e-3, 2e-3], "four updates of warm-up"


async def test_a_stopped_run_is_checkpointed_after_its_planned_step_and_goes_on(equal_runs: Runs) -> None:
    """The weights of the resumed run equal those of one that was never stopped."""
    undisturbed, stopped = await equal_runs.undisturbed(1), await equal_runs.make()
    row = update(RunTable).where(RunTable.run_id == stopped.run_id)
    async with equal_runs.database.begin() as connection:
        await connection.execute(row.values(stop_at=3))
    await equal_runs.train(stopped, 1, [])
    async with equal_runs.database.begin() as connection:
        found = await runs.get_run(connection, stopped.run_id)
        assert found is not None and (found.step, found.checkpoint_step) == (3, 3), "no step of `checkpoint_every`"
        assert stopped.run_id not in await learners.runs_wanting_learner(connection)
        await connection.execute(row.values(stop_at=None))
        assert stopped.run_id in await learners.runs_wanting_learner(connection)
    await equal_runs.train(stopped, 1, [])
    assert await equal_runs.digest(stopped) == undisturbed.digest
    await equal_runs.assert_trained_once(stopped)


def remove_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def overwrite_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"not a pickle")


def truncate_tensors(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.distcp"):
        os.truncate(path, path.stat().st_size // 2)


def remove_directory(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


@pytest.mark.parametrize(
    ("damage", "world_size"),
    [(remove_metadata, 1), (overwrite_metadata, 1), (truncate_tensors, 2), (remove_directory, 1)],
)
async def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    equal_runs: Runs, damage: Callable[[Path], None], world_size: int
) -> None:
    """Its steps are trained again from their plan rows, and the weights equal those of the undisturbed run."""
    undisturbed, damaged = await equal_runs.undisturbed(world_size), await equal_runs.make()
    row = update(RunTable).where(RunTable.run_id == damaged.run_id)
    async with equal_runs.database.begin() as connection:
        await connection.execute(row.values(stop_at=6))
    await equal_runs.train(damaged, world_size, [])
    newest = (damaged.checkpoints / damaged.run_id) / "step6.e1"
    damage(newest)
    async with equal_runs.database.begin() as connection:
        await connection.execute(row.values(stop_at=None))
    await equal_runs.train(damaged, world_size, [])
    assert await equal_runs.digest(damaged) == undisturbed.digest
    await equal_runs.assert_trained_once(damaged)


async def test_a_run_whose_checkpoints_are_all_damaged_is_paused_and_keeps_its_pointer(equal_runs: Runs) -> None:
    """The directory may only be unmounted: when it is back, the run goes on from its newest checkpoint."""
    settings = await equal_runs.make()
    row = update(RunTable).where(RunTable.run_id == settings.run_id)
    async with equal_runs.database.begin() as connection:
        await connection.execute(row.values(stop_at=6))
    await equal_runs.train(settings, 1, [])
    directory = settings.checkpoints / settings.run_id
    directory.rename(directory.with_name("unmounted"))
    async with equal_runs.database.begin() as connection:
        await connection.execute(row.values(stop_at=None))
    assert await asyncio.to_thread(Group(settings, 1, equal_runs.home / "lost").wait) == [0]
    async with equal_runs.database.begin() as connection:
        found = await runs.get_run(connection, settings.run_id)
        assert found is not None and (found.state, found.checkpoint_step) == ("paused", 6)
        assert "none of the 3 checkpoints can be read" in found.state_reason, "rows stay when old files are deleted"
        await connection.execute(row.values(state="running", state_reason=""))
    directory.with_name("unmounted").rename(directory)
    await equal_runs.train(settings, 1, [])
    await equal_runs.assert_trained_once(settings)


async def test_a_poison_batch_is_discarded_and_another_one_takes_its_place(equal_runs: Runs) -> None:
    training = equal_runs.config.training.model_copy(update={"max_skipped_steps": 0})
    equal_runs.config = equal_runs.config.model_copy(update={"training": training})
    settings = await equal_runs.make()
    async with equal_runs.database.begin() as connection:
        later = (BatchTable.run_id == settings.run_id) & (BatchTable.step > 1)
        await connection.execute(delete(BatchTable).where(later))
        of_later = (BatchItemTable.run_id == settings.run_id) & (BatchItemTable.step > 1)
        freed = await connection.execute(delete(BatchItemTable).where(of_later).returning(BatchItemTable.group_id))
        ready = update(RolloutGroupTable).where(RolloutGroupTable.id.in_(list(freed.scalars())))
        await connection.execute(ready.values(state="ready"))
        of_first = select(BatchItemTable.group_id).where(BatchItemTable.run_id == settings.run_id)
        hit = select(RolloutTable.id).where(RolloutTable.group_id.in_(of_first))
        poison = logprobs_to_bytes([float("nan")] * 15)
        await connection.execute(update(TurnTable).where(TurnTable.rollout_id.in_(hit)).values(logprobs=poison))
    assert await asyncio.to_thread(Group(settings, 1, equal_runs.home / "poisoned").wait) == [0]

    async def ask(request_id: str, reason: str = "an infinite gradient") -> SteeringAnswer:
        async with equal_runs.database.begin() as connection:
            request = Request(settings.run_id, request_id, "anna", reason)
            return await steering.record_skipped_step(connection, request)

    async with equal_runs.database.begin() as connection:
        found = await runs.get_run(connection, settings.run_id)
        assert found is not None and "not finite" in found.state_reason
    with pytest.raises(ConfigError, match="needs a reason"):
        await ask("without a reason", "")
    async with equal_runs.database.begin() as connection:
        await metrics.record_metrics(connection, settings.run_id, 1, {"reward_mean/family/of the first batch": 1.0})
    assert "groups of step 1 are discarded" in (await ask("first")).text
    async with equal_runs.database.begin() as connection:
        assert 1 not in await metrics_by_step(connection, settings.run_id, 0, 100)
    assert not (await ask("first")).changed
    with pytest.raises(ConfigError, match="no step that is planned"):
        await ask("second")
    async with equal_runs.database.begin() as connection:
        audit = (await connection.execute(select(SteeringTable))).one()
        assert (audit.action, audit.target, audit.from_step) == ("skip_step", "step/1", 1)
        assert len(audit.before) == equal_runs.config.training.groups_per_step
        state = update(RunTable).where(RunTable.run_id == settings.run_id)
        await connection.execute(state.values(state="running", state_reason="", stop_at=1))
    with pytest.raises(ConfigError, match=rf"is running.*`ratchet pause {settings.run_id}` first"):
        await ask("third")
    async with equal_runs.database.begin() as connection:
        assert await planner.plan_step(connection, settings.run_id, equal_runs.config) == 1
        said = await explain_thing(connection, f"{settings.run_id}@1")
        assert said is not None and "anna discarded a plan of step 1" in said[1] and "an infinite gradient" in said[1]
        of_group = select(RolloutTable.id).join(RolloutGroupTable, RolloutGroupTable.id == RolloutTable.group_id)
        one = of_group.where(RolloutGroupTable.workflow_id == audit.before[0]).limit(1)
        said = await explain_thing(connection, str((await connection.execute(one)).scalar_one()))
        assert said is not None and "anna discarded a plan of step 1" in said[-1]
        mine = select(BatchItemTable.group_id).where(BatchItemTable.run_id == settings.run_id)
        states_now = select(RolloutGroupTable.workflow_id, RolloutGroupTable.state).where(
            RolloutGroupTable.id.in_(mine) | RolloutGroupTable.workflow_id.in_(audit.before)
        )
        groups = {row.workflow_id: row.state for row in await connection.execute(states_now)}
    assert {groups.pop(name) for name in audit.before} == {"cancelled"} and set(groups.values()) == {"consumed"}
    await equal_runs.train(settings, 1, [])
    assert await states(equal_runs.database, settings.run_id) == ["committed"]
