"""A gateway on a copy of another's root directory."""

import shutil
from pathlib import Path

import psutil
import pytest

from sandbox_gateway.box_fleet import CreateRequest, Fleet, cgroup_parent
from sandbox_gateway.boxd import cgroups
from sandbox_gateway.images import Catalogue
from sandbox_gateway.settings import GatewaySettings
from tests.unit.sandbox_gateway.test_box_end import _SLEEP, _record


@pytest.mark.parametrize("is_copied", (True, False))
async def test_a_copied_record_ends_no_process_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    """The record of a box whose boxd does not answer names the original's control group."""
    box_id = "i" + "a" * 20
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "boxes" / box_id).mkdir(parents=True)
    (original / "trash").mkdir()
    group = f"{cgroup_parent(original)}/{box_id}"
    with psutil.Popen(_SLEEP, cwd=tmp_path) as living:
        for controller in ("memory", "pids", "freezer", "cpuacct"):
            directory = tmp_path / "mounted" / controller / group
            directory.mkdir(parents=True)
            (directory / "cgroup.procs").write_text(f"{living.pid}\n")
        monkeypatch.setattr(cgroups, "MOUNT", str(tmp_path / "mounted"))
        monkeypatch.setattr(cgroups, "_REMOVE_TRIES", 1)
        record = _record(box_id).model_copy(update={"spec": {"cgroup": group, "uid_base": 1 << 31}})
        (original / "boxes" / box_id / "box.json").write_text(record.model_dump_json())
        shutil.copytree(original, copy)
        root = copy if is_copied else original
        settings = GatewaySettings(root_directory=root, api_key="k")
        fleet = Fleet(settings, Catalogue(tmp_path / "state", None, {}, ()), lambda: pytest.fail("no box is made"))
        await fleet._adopt(root / "boxes" / box_id)
        assert not (root / "boxes" / box_id).exists()
        if is_copied:
            assert living.is_running() and living.status() != psutil.STATUS_ZOMBIE
            living.kill()
        assert living.wait(10) == -9


async def test_a_box_without_a_directory_gives_its_slot_back(tmp_path: Path) -> None:
    """None can be made, as on a full disk."""
    settings = GatewaySettings(root_directory=tmp_path / "missing", api_key="k", max_boxes=1)
    fleet = Fleet(settings, Catalogue(tmp_path / "state", None, {}, ()), lambda: pytest.fail("no box is made"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await fleet.create(CreateRequest("host", {}, {}, ttl_seconds=60, idempotency_key=None))
