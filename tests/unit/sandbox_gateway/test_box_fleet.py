"""A gateway on a copy of another's root directory."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from sandbox_gateway.box_fleet import CreateRequest, Fleet, cgroup_parent
from sandbox_gateway.boxd import cgroups
from sandbox_gateway.boxd.protocol import clock
from sandbox_gateway.images import Catalogue
from sandbox_gateway.settings import GatewaySettings
from sandbox_gateway.wire_errors import RefusalError
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


@dataclass
class _NoBoots:
    """A fork server that boots nothing. `latest`: the seconds after which a box would have been given up."""

    latest: float = 0.0

    async def boot(self, directory: Path, _seconds: float) -> int:
        self.latest = json.loads((directory / "box.json").read_bytes())["deadline"] - clock()
        raise RefusalError(503, "played")


@pytest.mark.parametrize(("copies", "expected"), ((False, 90), (True, 3660)))
async def test_a_box_that_copies_nothing_is_given_up_soon(tmp_path: Path, copies: bool, expected: int) -> None:
    """By a gateway that is started meanwhile."""
    settings = GatewaySettings(root_directory=tmp_path, api_key="k")
    for name in ("boxes", "trash"):
        (tmp_path / name).mkdir()
    server, catalogue = _NoBoots(), Catalogue(tmp_path / "state", None, {}, ())
    fleet = Fleet(settings, catalogue, lambda: pytest.fail("it is there"))
    fleet._fork_server = server  # type: ignore[assignment]
    fleet._copies_images = copies
    catalogue._host = replace(catalogue._host, lower=str(tmp_path))
    with pytest.raises(RefusalError):
        await fleet.create(CreateRequest("host", {}, {}, ttl_seconds=60, idempotency_key=None))
    assert expected - 10 < server.latest <= expected
