"""Ranks as processes without Ray, killed on demand: forked with torch imported, joined by gloo over a file.

A fault test needs dozens of short-lived ranks, and importing torch takes longer than all their work.
"""

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from training.rank_runtime import RankSettings

Kill = tuple[str, int, int]
"""(point, step, rank): SIGKILL, once."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["tests.integration.training.ranks", "training.train_loop", "transformers.models.qwen3.modeling_qwen3"]
)

_ERRORS = "errors"


def _rank(
    settings: RankSettings,
    rank: int,
    world_size: int,
    directory: Path,
    meeting: Path,
    kills: Sequence[Kill],
    stops: Sequence[Kill],
) -> None:
    import torch.distributed as dist

    from training.train_loop import train_rank

    def after(point: str, step: int) -> None:
        mark = directory / f"{point}.{step}.{rank}"
        if (point, step, rank) in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (point, step, rank) in stops:
            os.kill(os.getpid(), signal.SIGSTOP)

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    try:
        train_rank(settings, after)
    except Exception as error:
        with (directory / _ERRORS).open("a") as file:
            file.write(f"rank {rank}: {error!r:.600}\n")
        raise
    dist.destroy_process_group()


class Group:
    """One incarnation of all ranks. `kills` and `stops` name the points at which a rank gets SIGKILL or SIGSTOP."""

    def __init__(
        self,
        settings: RankSettings,
        world_size: int,
        directory: Path,
        kills: Sequence[Kill] = (),
        stops: Sequence[Kill] = (),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        meeting = directory / f"meeting.{uuid.uuid4().hex}"
        arguments = [(settings, rank, world_size, directory, meeting, kills, stops) for rank in range(world_size)]
        self.processes: list[BaseProcess] = [_forks.Process(target=_rank, args=args) for args in arguments]
        for process in self.processes:
            process.start()

    def wait(self, timeout_seconds: float = 300) -> list[int | None]:
        """Return the exit codes. A rank that lost its peer ends by itself."""
        for process in self.processes:
            process.join(timeout_seconds)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, "a rank hung"
        return codes

    def wait_until_stopped(self, timeout_seconds: float = 300) -> None:
        until = time.monotonic() + timeout_seconds
        while any(
            Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
            for process in self.processes
        ):
            assert time.monotonic() < until, "a rank did not reach its stop"
            time.sleep(0.02)

    def resume(self) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def supervise(settings: RankSettings, world_size: int, directory: Path, kills: Sequence[Kill] = ()) -> int:
    """Start the group again until it ends by itself, as Ray Train does; return the number of incarnations."""
    incarnations = 1
    while any(codes := Group(settings, world_size, directory, kills).wait()):
        incarnations += 1
        if incarnations > len(kills) + 1:
            errors = directory / _ERRORS
            reasons = errors.read_text() if errors.exists() else "no rank raised"
            raise AssertionError(f"a rank died that was not killed: exit codes {codes}; {reasons}")
    return incarnations
