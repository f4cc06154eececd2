"""Ranks agree whether a checkpoint can be read, so that they never load two different ones."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from training import checkpoint

pytestmark = pytest.mark.usefixtures("single_rank")


def read_as_rank(meeting: Path, number: int, directory: Path, answer: Path) -> None:
    """Run one rank's process: write what it finds to `answer`."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    try:
        checkpoint._read_metadata(str(directory))
        found = "read"
    except checkpoint.DamagedCheckpointError as error:
        found = f"damaged: {error}"
    except OSError as error:
        found = f"not read: {error}"
    answer.write_text(found)
    dist.barrier()
    dist.destroy_process_group()


def found_by_two_ranks(tmp_path: Path, directories: tuple[Path, Path]) -> list[str]:
    forks = multiprocessing.get_context("forkserver")
    answers = [tmp_path / f"answer-{number}" for number in range(2)]
    ranks = [
        forks.Process(target=read_as_rank, args=(tmp_path / "meeting", number, directories[number], answers[number]))
        for number in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(400)
    return [answer.read_text() for answer in answers]


def test_a_directory_that_only_one_rank_misses_is_no_damage(tmp_path: Path) -> None:
    good = tmp_path / "good"
    state_dict_saver.save({"weight": torch.ones(2)}, checkpoint_id=good)
    one_blind = found_by_two_ranks(tmp_path, (good, tmp_path / "not mounted"))
    assert all(one.startswith("not read: ") and "1 of 2 ranks: rank 1" in one for one in one_blind)


def test_files_that_no_rank_can_read_are_damage(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    state_dict_saver.save({"weight": torch.ones(2)}, checkpoint_id=broken)
    (broken / ".metadata").write_bytes(b"\x80")
    assert all(one.startswith("damaged: ") for one in found_by_two_ranks(tmp_path, (broken, broken)))
