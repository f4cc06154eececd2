"""A run that the last release started goes on while every part of its stack is upgraded to this code, one by one.

A release adds itself as the last entry of `releases.toml`, and the test then starts from its commit. The stack is real,
with the tiny policy. Its parts find the code through a link on `PYTHONPATH`, which is what an update of a checkout in
place does to them: the parts that run keep the old code until they are started again.
"""

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml

from cli.console import say
from cli.down import kill_stack_boxes
from examples.tiny_policy.build import make_tiny_policy
from ratchet import paths
from ratchet.temporal_settings import load_temporal_settings
from stack.part_health import HealthState, read_health
from stack.parts import Stack
from stack.startup import connect_stack
from stack.supervisor import Supervisor
from tests.chaos.faults import wait_until
from tests.free_ports import free_ports
from tests.replay.record import record_all
from tests.replay.stored_run import replay_run

ROOT = Path(__file__).parents[2]
PARTS = ("worker", "adapter", "gateway", "learner", "engine", "temporal", "postgres", "watcher")
STEPS = 1000
"""More than there is time for: the run is drained when every part is upgraded."""


def _last_release() -> str:
    """Return the commit of the last release."""
    return str(tomllib.loads((ROOT / "releases.toml").read_text())["release"][-1]["commit"])


def _checkout(commit: str, out: Path) -> None:
    """Write the files of a commit to `out`; skip the test if this clone does not have it."""
    found = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"this clone has no commit {commit[:7]}: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as files:
        files.extractall(out, filter="data")


@dataclass
class Upgrade:
    """A stack whose parts run the code that the link `code` names."""

    stack: Stack
    code: Path
    run_id: str = ""

    def use(self, checkout: Path) -> None:
        new = self.code.with_suffix(".new")
        new.symlink_to(checkout)
        new.rename(self.code)

    def ratchet(self, *arguments: str) -> None:
        """Run a command with the code that the link names."""
        environment = os.environ | {"PYTHONPATH": str(self.code)}
        command = [sys.executable, "-P", "-m", "cli.main", *arguments]
        done = subprocess.run(
            command, env=environment, cwd=self.stack.home, text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            known = self.rows("SELECT state, state_reason FROM run") if self.run_id else []
            raise AssertionError(done.stdout + done.stderr + str(known))

    def rows(self, query: str, *values: Any) -> list[Any]:
        async def read() -> list[Any]:
            connection = await self._connect()
            try:
                return list(await connection.fetch(query, *values))
            finally:
                await connection.close()

        return asyncio.run(read())

    async def _connect(self) -> asyncpg.Connection:
        """Connect to Postgres, which may be starting again: the watcher has not looked since its last start."""
        address = self.stack.environment()["RATCHET_DATABASE_URL"].replace("+asyncpg", "")
        for _ in range(240):
            with contextlib.suppress(OSError, asyncpg.PostgresError):
                return await asyncpg.connect(address)
            await asyncio.sleep(0.5)
        return await asyncpg.connect(address)

    def value(self, query: str, *values: Any) -> Any:
        return self.rows(query, *values)[0][0]

    def num_graded(self) -> int:
        return int(self.value("SELECT count(*) FROM rollout WHERE run_id = $1 AND outcome = 'graded'", self.run_id))

    def step(self) -> int:
        """Return the newest step whose training is complete."""
        return int(self.value("SELECT step FROM run WHERE run_id = $1", self.run_id))

    def is_over(self) -> bool:
        return self.value("SELECT state FROM run WHERE run_id = $1", self.run_id) not in ("running", "paused")

    def restart(self, part: str) -> None:
        """Start a part again as an operator does, and wait until its new process answers."""
        supervisor = Supervisor(self.stack)

        def pid() -> int | None:
            return next(one.pid for one in supervisor.states() if one.name == part)

        before = pid()
        supervisor.stop(part)
        supervisor.start(part)

        def answers() -> bool:
            if pid() in (None, before):
                return False
            health = read_health(self.stack.home).get(part)
            return part == "watcher" or (health is not None and health.state is HealthState.ANSWERING)

        wait_until(answers, f"{part} answers with the new code", 300)


def _config(earlier: Path) -> dict[str, Any]:
    """Return the release's quickstart, smaller: steps of three groups, no evaluation."""
    policy = paths.cache() / "tests" / "tiny-0"
    make_tiny_policy(policy, 0, say)
    config: dict[str, Any] = yaml.safe_load((earlier / "configs" / "quickstart.yaml").read_text())
    config["model"] = str(policy)
    for dataset in config["datasets"]:
        dataset["path"] = str(earlier / "datasets" / "quickstart" / Path(dataset["path"]).name)
    config["training"] |= {"steps": STEPS, "groups_per_step": 3, "group_size": 4, "updates_per_step": 1}
    config["training"] |= {"checkpoint_every": 2, "max_groups_seen": 1000}
    config["evaluation"] = {"at": []}
    config["sandbox"]["max_boxes"] = 16
    return config


@pytest.fixture(scope="module")
def upgraded() -> Iterator[Upgrade]:
    """A run that was started by the last release and has ended after all parts were started again by this code."""
    base = Path(tempfile.mkdtemp(prefix="ratchet-upgrade-"))
    base.chmod(0o755)  # the embedded Postgres runs as another user
    home, earlier = base / "home", base / "earlier"
    home.mkdir()
    before = os.environ.get("RATCHET_HOME")
    try:
        _checkout(_last_release(), earlier)
        os.environ["RATCHET_HOME"] = str(home)
        config = base / "upgrade.yaml"
        config.write_text(yaml.safe_dump(_config(earlier)))
        free_ports(home)
        found = Upgrade(Stack(home), base / "code")
        found.use(earlier)
        found.ratchet("train", str(config), "--detach")
        wait_until(lambda: bool(found.rows("SELECT run_id FROM run")), "the run's workflow has made its row")
        found.run_id = found.value("SELECT run_id FROM run")
        wait_until(lambda: found.step() >= 1, "the release has trained a step", 900)
        _upgrade(found, config)
        step = found.step()
        wait_until(lambda: found.step() > step, "this code has trained a step", 900)
        found.ratchet("stop", found.run_id, "--drain")
        wait_until(found.is_over, "the run is over", 900)
        if folder := os.environ.get("RATCHET_RECORD_HISTORIES"):
            asyncio.run(_record(found.stack, Path(folder)))
        yield found
        asyncio.run(kill_stack_boxes(found.stack.environment()))
    finally:
        if home.is_dir():
            Supervisor(Stack(home)).down()
        os.environ.pop("RATCHET_HOME", None)
        os.environ |= {"RATCHET_HOME": before} if before is not None else {}
        shutil.rmtree(base, ignore_errors=True)


async def _record(stack: Stack, folder: Path) -> None:
    await record_all(await connect_stack(stack, load_temporal_settings()), stack, folder)


def _upgrade(found: Upgrade, config: Path) -> None:
    """Migrate the schema under the parts that run, then start them again, with verdicts between one and the next."""
    found.use(ROOT)
    found.ratchet("up", str(config))
    for part in PARTS:
        graded = found.num_graded()
        wait_until(lambda graded=graded: found.num_graded() > graded, "another rollout is graded")
        found.restart(part)


@pytest.mark.timeout(2400)
def test_every_rollout_has_its_verdict(upgraded: Upgrade) -> None:
    (run,) = upgraded.rows("SELECT state, state_reason, step FROM run WHERE run_id = $1", upgraded.run_id)
    assert run["state"] == "stopped", run["state_reason"]
    outcomes = upgraded.rows(
        "SELECT outcome, outcome_reason, count(*) FROM rollout"
        " WHERE run_id = $1 AND claimed_at IS NOT NULL GROUP BY 1, 2",
        upgraded.run_id,
    )
    assert {row["outcome"] for row in outcomes} == {"graded"}, outcomes


def test_no_group_was_trained_twice(upgraded: Upgrade) -> None:
    trained = "SELECT group_id, count(*) FROM batch_item WHERE run_id = $1 AND use = 'trained' GROUP BY 1"
    step = upgraded.value("SELECT step FROM run WHERE run_id = $1", upgraded.run_id)
    rows = upgraded.rows(trained, upgraded.run_id)
    assert len(rows) == step * 3
    assert all(row["count"] == 1 for row in rows)


def test_no_box_is_left(upgraded: Upgrade) -> None:
    wait_until(
        lambda: upgraded.value("SELECT count(*) FROM sandbox WHERE state <> 'released'") == 0, "every box is released"
    )


def test_the_histories_of_both_versions_replay(upgraded: Upgrade) -> None:
    replayed = replay_run(upgraded.stack, upgraded.run_id)
    assert replayed.failures == {}
    step = upgraded.value("SELECT step FROM run WHERE run_id = $1", upgraded.run_id)
    assert replayed.count >= step * 3 * 5, "the groups and their rollouts"
