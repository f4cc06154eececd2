"""`kill -9` of worker, adapter, engine, learner, gateway and Temporal during one run, which ends like any other."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.box_lifecycle import INSTALLATION_KEY
from cli.console import say
from ratchet.config_sources import load_config
from ratchet.errors import ConfigError
from reads.publication import write_publication
from reads.runs import list_run_summaries
from sandboxes.e2b import E2BProvider
from stack.follow_run import start_run
from stack.parts import Stack
from stack.startup import bring_up
from store import installations, learners
from store.schema import BatchItemTable, BatchTable, RolloutGroupTable, RolloutTable, RunTable, SandboxTable
from tests.chaos.faults import PARTS, Faults, wait_until
from tests.replay.stored_run import replay_run

Read = Callable[[Callable[[AsyncConnection], Any]], Any]


@pytest.fixture(scope="module")
def killed_run(stack: Stack, config_path: Any, read: Read) -> str:
    """A run during which each part was killed once, at different rollouts."""
    config = load_config(config_path)
    run_id = asyncio.run(start_run(stack, config, "kills", new=True, say=say))
    faults = Faults(stack)

    def ended() -> int:
        return int(read(lambda connection: _ended(connection, run_id)))

    wait_until(lambda: ended() >= 1, "a rollout has ended")
    other = config.model_copy(update={"engine": config.engine.model_copy(update={"max_num_seqs": 7})})
    with pytest.raises(ConfigError, match=f"run {run_id} is still open"):  # its engine is not given to another config
        bring_up(stack, other, say)
    for number, part in enumerate(PARTS):
        wait_until(
            lambda number=number: ended() >= 2 * number + 1 or _is_over(read, run_id),
            f"{2 * number + 1} rollouts have ended",
        )
        if part == "learner":
            wait_until(
                lambda: read(lambda connection: learners.get_learner(connection, run_id)) is not None,
                "a rank has taken the lease",
            )
        faults.kill(part)
    wait_until(lambda: _is_over(read, run_id), "the run is over", timeout_seconds=900)
    return run_id


async def _ended(connection: AsyncConnection, run_id: str) -> int:
    return int(
        (
            await connection.execute(select(func.count(RolloutTable.outcome)).where(RolloutTable.run_id == run_id))
        ).scalar_one()
    )


def _is_over(read: Read, run_id: str) -> bool:
    runs = {run.run_id: run for run in read(list_run_summaries)}
    return run_id in runs and runs[run_id].state not in ("running", "paused")


@pytest.mark.timeout(2400)
def test_the_run_is_done(killed_run: str, read: Read) -> None:
    run = next(run for run in read(list_run_summaries) if run.run_id == killed_run)
    assert (run.state, run.step, run.checkpoint_step) == ("done", 3, 3), run.reason


def test_every_started_rollout_has_exactly_one_outcome(killed_run: str, read: Read) -> None:
    async def outcomes(connection: AsyncConnection) -> dict[tuple[str | None, str | None], int]:
        columns = (RolloutTable.outcome, RolloutTable.outcome_reason)
        statement = select(*columns, func.count()).where(
            RolloutTable.run_id == killed_run, RolloutTable.claimed_at.is_not(None)
        )
        return {(row[0], row[1]): row[2] for row in await connection.execute(statement.group_by(*columns))}

    found = read(outcomes)
    assert {outcome for outcome, _ in found} == {"graded"}, found


def test_no_group_is_trained_twice(killed_run: str, read: Read) -> None:
    async def trained(connection: AsyncConnection) -> list[int]:
        rows = await connection.execute(
            select(BatchTable.members).where(BatchTable.run_id == killed_run, BatchTable.state == "committed")
        )
        return [group for (members,) in rows for group in {member["group_id"] for member in members}]

    async def items(connection: AsyncConnection) -> list[int]:
        statement = select(BatchItemTable.group_id).where(
            BatchItemTable.run_id == killed_run, BatchItemTable.use == "trained"
        )
        return list((await connection.execute(statement)).scalars())

    groups = read(trained)
    assert len(groups) == len(set(groups)) == 9
    assert sorted(groups) == sorted(read(items))


def test_its_publication_is_verified_without_the_product(killed_run: str, read: Read, tmp_path: Path) -> None:
    out = tmp_path / "published"
    counts = read(lambda connection: write_publication(connection, [killed_run], out))
    checked = subprocess.run([sys.executable, "-I", str(out / "verify.py")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert counts["trained_turn"] and counts["grade"] and (out / f"{killed_run}.yaml").is_file()


def test_no_turn_was_sampled_by_weights_of_another_run(killed_run: str, read: Read) -> None:
    """Tokens of a killed engine that a client may have seen have the version `default`, which planning masks."""

    async def unknown(connection: AsyncConnection) -> int:
        statement = text(
            "SELECT count(*) FROM turn t JOIN rollout r ON r.id = t.rollout_id, "
            "jsonb_array_elements(t.version_spans) span"
            " WHERE r.run_id = :run AND t.state = 'completed' AND span->>'version' NOT LIKE :like"
            " AND span->>'version' <> 'default'"
        )
        return int((await connection.execute(statement, {"run": killed_run, "like": f"{killed_run}/%"})).scalar_one())

    assert read(unknown) == 0


def test_no_box_is_left(killed_run: str, stack: Stack, read: Read) -> None:
    """Neither in the ledger nor at the provider, after the groups in flight at the end have ended too."""

    async def held(connection: AsyncConnection) -> int:
        open_groups = (
            select(func.count())
            .select_from(RolloutGroupTable)
            .where(RolloutGroupTable.run_id == killed_run, RolloutGroupTable.state == "open")
        )
        boxes = select(func.count()).select_from(SandboxTable).where(SandboxTable.state != "released")
        return int((await connection.execute(open_groups)).scalar_one()) + int(
            (await connection.execute(boxes)).scalar_one()
        )

    wait_until(lambda: read(held) == 0, "every group has ended and every box is released")
    environment = stack.environment()
    installation = read(installations.installation_id)

    async def listed() -> list[str]:
        provider = E2BProvider(environment["E2B_API_KEY"], environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"])
        boxes = await provider.list({INSTALLATION_KEY: str(installation)})
        await provider.close()
        return [box.id for box in boxes]

    wait_until(lambda: asyncio.run(listed()) == [], "the provider holds no box of ours")


def test_the_learner_was_fenced(killed_run: str, read: Read) -> None:
    """The killed rank came back with a higher epoch."""

    async def epoch(connection: AsyncConnection) -> int:
        return int((await connection.execute(select(RunTable.epoch).where(RunTable.run_id == killed_run))).scalar_one())

    assert read(epoch) >= 2


def test_every_history_replays(killed_run: str, stack: Stack) -> None:
    """The workflows' decisions through six kills follow from their histories alone."""
    replayed = replay_run(stack, killed_run)
    assert replayed.failures == {}
    assert replayed.count >= 1 + 9 + 9 * 4, "the run, its groups, their rollouts"
