"""`deploy/slurm/train.sbatch` under a real SLURM: jobs cut by their time limit train the run that one uncut job trains.

SLURM's daemons run here, on a configuration of their own. Skipped without root or the packages slurm-wlm and munge.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
import yaml

from stack.ports import free_port
from stack.postgres import database_url, embedded_server
from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS, GROUPS, GROUP_SIZE = 20, 3, 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """
ClusterName=ratchet
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={control_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation={home}/control
SlurmdSpoolDir={home}/node
SlurmctldPidFile={home}/control.pid
SlurmdPidFile={home}/node.pid
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
ROWS = """
SELECT g.group_no, t.row_no FROM rollout_group g JOIN task t ON t.id = g.task_id WHERE g.purpose = 'train'
"""


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    search = f"{os.environ['PATH']}:/usr/sbin"
    if os.geteuid() != 0 or any(shutil.which(one, path=search) is None for one in PROGRAMS):
        pytest.skip("SLURM's daemons need root and the packages slurm-wlm and munge")
    monkeypatch.setenv("PATH", search)
    for name in ("munge", "control", "node"):
        (home / name).mkdir()
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o400)
    places = {"key-file": "munge.key", "socket": "munge/socket", "pid-file": "munge/pid", "seed-file": "munge/seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{name}={home / place}" for name, place in places.items())]
    ports = {"control_port": free_port(), "node_port": free_port()}
    host = socket.gethostname()
    (home / "slurm.conf").write_text(CONFIG.format(home=home, host=host, cpus=os.cpu_count(), **ports))
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    with contextlib.ExitStack() as daemons:
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D"]):
            with (home / f"{command[0]}.log").open("wb") as log:
                daemon = subprocess.Popen(command, stdout=log, stderr=log)
            daemons.callback(daemon.wait)
            daemons.callback(daemon.terminate)
            if command is munged:
                eventually(lambda: (home / "munge/socket").exists(), 30)
        eventually(lambda: "idle" in output("sinfo", "-h", "-o", "%t"), 60)
        yield


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def eventually(holds: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


def train(config: Path, state: Path, minutes: int) -> int:
    """Run a chain of jobs to its end; return how often SLURM has put the job into the queue again."""
    options = [f"--time={minutes}", "--signal=B:TERM@60", f"--output={state}.log"]
    variables = {**os.environ, "CONFIG": str(config), "RATCHET_HOME": str(state), "EXP_TAG": state.name}
    command = ["sbatch", "--parsable", *options, "deploy/slurm/train.sbatch"]
    said = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    job = said.strip()
    try:
        until = time.monotonic() + 1800
        while True:
            shown = dict(word.split("=", 1) for word in output("scontrol", "show", "job", job).split() if "=" in word)
            if shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime":  # SLURM waits two minutes by itself
                time.sleep(10)  # a node refuses the credential of a job that it has ended within the same seconds
                subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=True)
            if shown["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
                logs = [Path(f"{state}.log").read_text()[-3000:], (state.parent / "slurmctld.log").read_text()[-2000:]]
                assert shown["JobState"] == "COMPLETED", "\n".join([str(shown), *logs])
                return int(shown["Restarts"])
            assert time.monotonic() < until, Path(f"{state}.log").read_text()[-4000:]
            time.sleep(1)
    finally:
        subprocess.run(["scancel", job], check=False)
        shutil.rmtree(ROOT / "runs" / f"{state.name}_{job}", ignore_errors=True)


def stored(state: Path) -> tuple[list[tuple[int, str, int]], dict[int, int]]:
    """Return step, state and number of members of each plan row, and the task's row of each group of the run."""
    port = free_port()
    with embedded_server(state / "postgres", port):

        async def read() -> tuple[list[tuple[int, str, int]], dict[int, int]]:
            connection = await asyncpg.connect(database_url(port))
            plans = await connection.fetch("SELECT step, state, jsonb_array_length(members) FROM batch ORDER BY step")
            groups = await connection.fetch(ROWS)
            await connection.close()
            return [tuple(row) for row in plans], {row[0]: row[1] for row in groups}

        return asyncio.run(read())


def test_a_chain_of_cut_jobs_trains_the_run_of_one_job(slurm: None, home: Path, config_path: Path) -> None:
    """Sampling is not reproducible, so which groups have a signal differs; tasks and plan rows do not."""
    config = yaml.safe_load(config_path.read_text())
    config["training"] |= {"steps": STEPS, "groups_per_step": GROUPS, "group_size": GROUP_SIZE, "checkpoint_every": 1}
    (home / "chain.yaml").write_text(yaml.safe_dump(config))
    num_cuts = train(home / "chain.yaml", home / "cut", minutes=4)
    print(f"{num_cuts} cuts", file=sys.stderr)
    assert num_cuts >= 3, "give the chain more steps if this machine trains them within three jobs"
    assert train(home / "chain.yaml", home / "uncut", minutes=60) == 0
    plans, tasks = stored(home / "cut")
    assert plans == [(step, "committed", GROUPS * GROUP_SIZE) for step in range(1, STEPS + 1)]
    other_plans, other_tasks = stored(home / "uncut")
    assert plans == other_plans
    common = tasks.keys() & other_tasks.keys()
    assert len(common) >= STEPS * GROUPS and all(tasks[number] == other_tasks[number] for number in common)
