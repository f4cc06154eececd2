"""The job script ends the run in order when SLURM warns it, and is queued again; a run that ends by itself is not.

The commands of SLURM and `ratchet` are stand-ins that write down how they were called; bash is real.
"""

import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy/slurm/train.sbatch"
PROGRAMS = {
    "scontrol": 'echo "scontrol $*" >>"$CALLS"; [ "$1" = show ] && printf "localhost\\n%s" "$OTHERS"; exit 0',
    "ratchet": (
        'cat "$2" >>"$CALLS"; trap \'kill $!; echo ended >>"$CALLS"; exit ${STATUS:-130}\' TERM; '
        'echo "ratchet $1 $3 $4" >>"$CALLS"; [ -n "$ENDS" ] && exit 3; sleep 1000 >/dev/null & echo up; wait $!'
    ),
}


def run(directory: Path, **variables: str) -> "subprocess.Popen[str]":
    for name, body in PROGRAMS.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    values = {
        "PATH": f"{directory}:/usr/bin:/bin",
        "CALLS": str(directory / "calls"),
        "SLURM_SUBMIT_DIR": str(directory),
    }
    values |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "RATCHET": str(directory / "ratchet")}
    return subprocess.Popen(
        ["bash", str(SCRIPT)], env=values | {"OTHERS": "", "ENDS": ""} | variables, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize("others", ["", "localhost\n"])
def test_a_job_that_is_cut_off_ends_its_run_and_is_queued_again(tmp_path: Path, others: str) -> None:
    with run(tmp_path, OTHERS=others) as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        job.stdout.read()
        assert job.wait() == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    hosts = ["127.0.0.1"] if others else []
    assert calls == [
        "scontrol show hostnames n[1-2]", *hosts, "ratchet launch --config configs/quickstart.yaml", "ended",
        "scontrol requeue 7",
    ]  # fmt: skip


def test_a_run_that_ends_by_itself_ends_the_chain(tmp_path: Path) -> None:
    with run(tmp_path, ENDS="1") as job:
        assert job.wait() == 3
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_a_run_that_has_ended_when_the_job_is_cut_off_ends_the_chain(tmp_path: Path) -> None:
    """Another job would begin a new run."""
    with run(tmp_path, STATUS="0") as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGTERM)
        job.stdout.read()
        assert job.wait() == 0
    assert "requeue" not in (tmp_path / "calls").read_text()


def test_slurm_is_told_to_warn_and_to_keep_the_log() -> None:
    told = [line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=B:TERM@240", "--requeue", "--open-mode=append"} <= set(told)
