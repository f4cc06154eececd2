"""The end of a box's processes, and the data that is kept until then."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandbox_gateway import box_end
from sandbox_gateway.box_client import BoxClient, BoxRecord
from sandbox_gateway.box_fleet import Fleet
from sandbox_gateway.images import Catalogue
from sandbox_gateway.settings import GatewaySettings

_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process that is not reaped before the end of the test, as below a PID 1 that does not reap."""
    work = tmp_path / "work"
    work.mkdir()
    process = psutil.Popen(_SLEEP, cwd=work)
    yield process
    process.kill()
    process.wait()


def test_a_process_that_is_not_reaped_has_ended(child: psutil.Popen, tmp_path: Path) -> None:
    watched = psutil.Process(child.pid)
    assert box_end.any_runs([watched])
    assert box_end.kill_processes(tmp_path / "work", 20) == []
    assert watched.status() == psutil.STATUS_ZOMBIE and not box_end.any_runs([watched])


def test_processes_are_found_by_their_users(child: psutil.Popen) -> None:
    own = os.getuid()
    assert child.pid in {process.pid for process in box_end.processes_of_users(own, 1)}
    assert box_end.processes_of_users(own + 1_000_000_000, 1) == []
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:
        subprocess.run(["true"], check=True)
    assert child.pid not in {process.pid for process in box_end.processes_of_users(own, 1)}


def _record(box_id: str) -> BoxRecord:
    return BoxRecord(
        id=box_id,
        template="base",
        token="t",
        slot=3,
        metadata={},
        idempotency_key="key",
        started_at=0.0,
        deadline=1e12,
        memory_bytes=1 << 30,
        spec={"cgroup": "", "uid_base": 1 << 31},
    )


async def test_the_slot_and_the_record_of_a_box_are_kept_until_its_processes_have_ended(
    child: psutil.Popen, tmp_path: Path
) -> None:
    """A gateway that is started again meanwhile reads in the record that the slot is taken."""
    settings = GatewaySettings(root_directory=tmp_path / "root", api_key="k")
    for name in ("boxes", "trash"):
        (settings.root_directory / name).mkdir(parents=True)
    fleet = Fleet(settings, Catalogue(tmp_path / "state", None, {}, ()), lambda: pytest.fail("nothing is booted"))
    box_id = "i" + "a" * 20
    directory = settings.root_directory / "boxes" / box_id
    directory.mkdir()
    box = BoxClient(directory, _record(box_id))
    box.save(box.record)
    fleet._slots.add(3)
    fleet._discard(box, [psutil.Process(child.pid)])
    await asyncio.sleep(0)
    kept = BoxRecord.model_validate_json((directory / "box.json").read_bytes())
    assert (kept.slot, kept.deadline) == (3, 0.0) and fleet._slots == {3}
    child.kill()
    async with asyncio.timeout(60):
        await asyncio.gather(*fleet._background)
        await asyncio.gather(*fleet._background)
    assert fleet._slots == set()
    assert list((settings.root_directory / "boxes").iterdir()) == list((settings.root_directory / "trash").iterdir())
