"""`ratchet launch` as a process of one host, and what must hold when it has ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from sqlalchemy import select

from store.database import Database
from store.schema import BatchItemTable, BatchTable, RolloutTable, RunTable
from tests.e2e.conftest import ROOT
from tests.free_ports import free_ports
from tests.network_hosts import NetworkHost

LAUNCHER = ROOT / "examples" / "coding_agent_rl" / "run_qwen36_35b_a3b_swe_8nodes.sh"


@dataclass
class Launch:
    """`output`: stdout and stderr. `directory`: of its log and dumps. `seconds`: how long it took, once it is done."""

    process: "subprocess.Popen[bytes]"
    output: Path
    directory: Path
    started_at: float
    seconds: float = 0.0

    def until(self, holds: Callable[[], bool], seconds: float = 600) -> None:
        """Wait for a condition; fail if the launch ends before."""
        end = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None and time.monotonic() < end, self.words()
            time.sleep(0.5)

    def wait_done(self, seconds: float = 900) -> None:
        """Wait for its end and require that it has succeeded."""
        self.process.wait(seconds)
        self.seconds = time.monotonic() - self.started_at
        assert self.process.returncode == 0, self.words()

    def said(self) -> str:
        return self.output.read_text()

    def words(self) -> str:
        return self.said()[-4000:]

    def dumped(self) -> dict[str, set[int]]:
        """Return file of dumps, such as `rollout_1` → the rollouts in it."""
        files = (self.directory / "rollout_dumps").glob("*.pt")
        loaded = {path.stem: torch.load(path, weights_only=True)["samples"] for path in files}
        return {name: {one["rollout_id"] for one in samples} for name, samples in loaded.items()}


def evaluation_config(path: Path, home: Path, num_rollouts: int, *engines: str) -> dict[str, Any]:
    """The config of an evaluation: scripted engines have no weights that a step could replace."""
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    tasks = (ROOT / "datasets/quickstart/heldout.jsonl").read_text().splitlines(keepends=True)
    (home / "tasks.jsonl").write_text("".join(tasks[:num_rollouts]))
    config["datasets"] = [{"path": str(home / "tasks.jsonl"), "use": "eval"}]
    config["training"]["steps"] = 0
    config["evaluation"] = {"at": ["start"], "temperatures": [1.0], "samples": 1}
    return config | {"engines": [{"address": address} for address in engines]}


@contextlib.contextmanager
def launching(
    home: Path,
    head: NetworkHost,
    cluster: Mapping[str, object] | None,
    config: Mapping[str, object] | None,
    variables: Mapping[str, str],
) -> Iterator[Launch]:
    """Run `ratchet launch` on the head with the state directory `home`/state; end it if the block fails. None: the
    variables name the hosts, and values of the launcher's config."""
    state = home / "state"
    state.mkdir(mode=0o755, parents=True)
    free_ports(state)  # of the machine: a port that is free on a host only may name a directory that another stack has
    names = []
    if cluster is not None:
        (home / "cluster.yaml").write_text(yaml.safe_dump(dict(cluster)))
        names.append(str(home / "cluster.yaml"))
    if config is not None:
        (home / "launch.yaml").write_text(yaml.safe_dump(dict(config)))
        names += ["--config", str(home / "launch.yaml")]
    name = f"{home.parent.name}-{home.name}"
    own = {"RATCHET_HOME": str(state), "STAMP": "launched", "EXP_TAG": name}
    directory = ROOT / "runs" / f"{name}_launched"
    started_at = time.monotonic()
    with (home / "launch.out").open("wb") as output:
        process = subprocess.Popen(
            head.inside(*([str(ROOT / ".venv/bin/ratchet"), "launch", *names] if names else ["sh", str(LAUNCHER)])),
            cwd=ROOT,
            env={**os.environ, **own, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Launch(process, home / "launch.out", directory, started_at)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(300)
        print((home / "launch.out").read_text())  # pytest shows it if the test fails
        shutil.rmtree(directory, ignore_errors=True)


def processes_with(*words: str) -> list[str]:
    """Return the commands of this machine's processes that contain one of the words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.pid != os.getpid() and any(word in line for word in words):
                found.append(line)
    return found


async def require_nothing_lost(database_url: str, dumped: Mapping[str, set[int]], steps: int, group_size: int) -> None:
    """Every step was committed once, from whole groups; no member counts twice, and every rollout was dumped once."""
    async with Database(database_url, pool_size=1) as database, database.begin() as connection:
        run = (await connection.execute(select(RunTable.state, RunTable.step))).one()
        batches = (await connection.execute(select(BatchTable.step, BatchTable.state))).all()
        items = (await connection.execute(select(BatchItemTable.group_id, BatchItemTable.step))).all()
        rollouts = (await connection.execute(select(RolloutTable.__table__))).mappings().all()
    assert tuple(run) == ("done", steps)
    assert sorted(tuple(batch) for batch in batches) == [(step, "committed") for step in range(1, steps + 1)]
    kept = Counter((one["group_id"], one["member"]) for one in rollouts if one["replaced_by"] is None)
    assert set(kept.values()) == {1}
    graded = [one for one in rollouts if one["outcome"] == "graded"]
    used = [one.group_id for one in items if one.step <= steps]
    step_of = {one.group_id: one.step for one in items if one.step <= steps}
    assert Counter(one["group_id"] for one in graded if one["group_id"] in used) == dict.fromkeys(used, group_size)
    assert [one["outcome_reason"] for one in rollouts if one["outcome"] not in ("graded", "cancelled")] == []
    in_files: dict[str, set[int]] = {}
    for one in rollouts:
        in_files.setdefault(f"rollout_{step_of.get(one['group_id'], 'unused')}", set()).add(one["id"])
    assert in_files == dumped
