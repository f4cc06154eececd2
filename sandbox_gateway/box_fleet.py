"""All boxes of one gateway: create, adopt, expire, kill. Capacity, uid slots and idempotency keys are counted here."""

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import string
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import structlog

from sandbox_gateway import box_end, disk_template, machine_probe
from sandbox_gateway.box_client import RECORD_FILE, BoxClient, BoxRecord
from sandbox_gateway.boxd import cgroups
from sandbox_gateway.boxd.id_modes import NUM_IDS, id_mode
from sandbox_gateway.boxd.protocol import BoxFaultError, BoxSpec, clock
from sandbox_gateway.fork_client import BOOT_SECONDS, COPY_SECONDS, ForkServer, remove_tree
from sandbox_gateway.images import Catalogue
from sandbox_gateway.settings import GatewaySettings
from sandbox_gateway.wire_errors import RETRY_AFTER, BoxNotFoundError, RefusalError

_ID = re.compile(r"i[a-z0-9]{20}")
_ID_ALPHABET = string.ascii_lowercase + string.digits
_FIRST_UID, _NUM_SLOTS = 1 << 30, 8192
_GRACE_SECONDS = 2.0
_DESTROY_SECONDS = 10.0
_ADOPT_SECONDS = 5.0
_ADOPT_AGAIN_SECONDS = 1.0
_REAP_SECONDS = 0.5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CreateRequest:
    template: str
    metadata: dict[str, str]
    env: dict[str, str]
    ttl_seconds: int
    idempotency_key: str | None
    network: bool = True
    """False: the box cannot reach the egress ports either."""


def _root_digest(root_directory: Path) -> int:
    return zlib.crc32(os.fsencode(root_directory.resolve()))


def cgroup_parent(root_directory: Path) -> str:
    """Return the control group that contains all boxes of the gateway with this root directory."""
    return cgroups.name_of(f"ratchet-{_root_digest(root_directory):08x}")


class Fleet:
    def __init__(
        self, settings: GatewaySettings, catalogue: Catalogue, start_fork_server: Callable[[], ForkServer]
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._start_fork_server = start_fork_server
        self._boxes_directory = settings.root_directory / "boxes"
        self._trash = settings.root_directory / "trash"
        root_digest = _root_digest(settings.root_directory)
        # Two gateways on one machine should not share uid ranges, so each starts at its own offset in the ring of
        # slots.
        self._first_slot = root_digest % _NUM_SLOTS
        self._cgroup_parent = cgroup_parent(settings.root_directory)
        self._has_cgroups = False
        self._disk_template = ""
        self._copies_images = False
        self._boxes: dict[str, BoxClient] = {}
        self._pending: dict[str, BoxRecord | None] = {}
        """Boxes of an earlier gateway that are neither adopted nor proven dead. None: the record cannot be read now."""
        self._slots: set[int] = set()
        self._creating: dict[str, asyncio.Task[BoxClient]] = {}
        self._boots = asyncio.Semaphore(settings.max_concurrent_boots)
        self._background: set[asyncio.Task[object]] = set()
        self._fork_server: ForkServer | None = None

    async def start(self) -> None:
        for directory in (self._boxes_directory, self._trash):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fork_server = self._start_fork_server()
        self._has_cgroups = _prepare_cgroups(self._cgroup_parent)
        self._disk_template = await asyncio.to_thread(_prepare_disk, self._settings)
        if not self._disk_template:
            self._copies_images = await asyncio.to_thread(_must_copy_images, self._trash)
        self._pending = {path.name: None for path in self._boxes_directory.iterdir()}
        await asyncio.gather(*(self._try_adopting(name) for name in list(self._pending)))
        for name in cgroups.children(self._cgroup_parent) - set(self._boxes) - set(self._pending):
            await asyncio.to_thread(cgroups.end_leftover, f"{self._cgroup_parent}/{name}")
        for leftover in self._trash.iterdir():
            self._spawn(asyncio.to_thread(remove_tree, leftover))
        self._spawn(self._reap_expired())
        self._spawn(self._adopt_pending())
        _log.info("boxes_adopted", num_boxes=len(self._boxes))

    async def stop(self) -> None:
        """Stop the gateway's own tasks; the boxes run on and the next gateway adopts them."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for box in self._boxes.values():
            self._unwatch(box)
            box.close()
        if self._fork_server is not None:
            await asyncio.to_thread(self._fork_server.close)
        cgroups.remove_parent(self._cgroup_parent)

    def all(self) -> list[BoxClient]:
        return list(self._boxes.values())

    def get(self, box_id: str) -> BoxClient:
        """Return a live box, running or paused. Raises BoxNotFoundError; an expired box counts as gone before it is
        removed. Raises RefusalError 503 for a box that is not adopted yet."""
        if box_id in self._pending:
            raise RefusalError(503, f"sandbox '{box_id}' cannot be reached at present", RETRY_AFTER)
        box = self._boxes.get(box_id)
        if box is None or clock() >= box.record.deadline:
            raise BoxNotFoundError(box_id)
        return box

    async def create(self, request: CreateRequest) -> BoxClient:
        """Boot a box. The same idempotency key returns the same box while it lives, also after a restart of the
        gateway.

        Raises RefusalError: 404 for an unknown image, 503 if there is no room, 504 if a box that is not adopted yet may
        have the key or the uid slot.
        """
        key = request.idempotency_key
        for pending in self._pending.values():
            if pending is None or (key is not None and pending.idempotency_key == key):
                raise RefusalError(504, "boxes of this gateway cannot be reached at present", RETRY_AFTER)
        if key is not None:
            for box in self._boxes.values():
                if box.record.idempotency_key == key and clock() < box.record.deadline:
                    return box
            if key in self._creating:
                return await asyncio.shield(self._creating[key])
        task = asyncio.create_task(self._create(request))
        if key is not None:
            self._creating[key] = task
            task.add_done_callback(lambda _: self._creating.pop(key, None))
        return await asyncio.shield(task)

    async def kill(self, box: BoxClient) -> bool:
        """End a box: its processes are killed, and no call reaches it any more. False: another call ends it.

        Its slot is free and its files are removed once its processes have ended. This waits for them, but no longer
        than `_DESTROY_SECONDS` for a boxd that does not answer and as long again for those that hang in the kernel.
        """
        if self._boxes.get(box.id) is not box:
            return False
        del self._boxes[box.id]
        self._unwatch(box)
        self._discard(box, await self._end(box))
        return True

    async def set_deadline(self, box: BoxClient, deadline: float) -> None:
        await box.control(op="deadline", deadline=deadline)
        box.save(box.record.model_copy(update={"deadline": deadline}))

    async def set_paused(self, box: BoxClient, paused: bool) -> None:
        await box.control(op="freeze", frozen=paused)
        box.save(box.record.model_copy(update={"state": "paused" if paused else "running"}))

    async def _create(self, request: CreateRequest) -> BoxClient:
        plan = self._catalogue.plan(request.template)
        slot = self._take_slot()
        settings, ids = self._settings, id_mode()
        letters = "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))
        box_id = f"i{settings.box_id_prefix}{letters[len(settings.box_id_prefix) :]}"
        own_uid_base = _FIRST_UID + (self._first_slot + slot) % _NUM_SLOTS * NUM_IDS
        spec = BoxSpec(
            box_id=box_id,
            uid_base=own_uid_base if ids.first_id is None else ids.first_id,
            num_ids=ids.num_ids,
            shares_ids=ids.first_id is not None,
            cgroup=f"{self._cgroup_parent}/{box_id}" if self._has_cgroups else "",
            memory_bytes=settings.memory_bytes,
            max_processes=settings.max_processes,
            egress_ports=list(settings.egress_ports) if request.network else [],
            ttl_seconds=request.ttl_seconds,
            grace_seconds=_GRACE_SECONDS,
            default_user=plan.default_user,
            workdir=plan.workdir,
            env={**plan.env, **request.env},
            binds=plan.binds,
            links=plan.links,
            owned_directories=plan.owned_directories,
            lower=plan.lower,
            copies_image=self._copies_images and plan.lower is not None,
            disk_template=self._disk_template,
            disk_bytes=(settings.disk_bytes or 0) if self._disk_template else 0,
            extra_path=self._catalogue.extra_path,
        )
        record = BoxRecord(
            id=box_id,
            template=request.template,
            token=secrets.token_urlsafe(24),
            slot=slot,
            metadata=request.metadata,
            idempotency_key=request.idempotency_key,
            started_at=time.time(),
            deadline=0.0,  # set by the boot
            memory_bytes=settings.memory_bytes,
            spec=asdict(spec),
        )
        return await self._boot(record)

    def _take_slot(self) -> int:
        if len(self._slots) >= self._settings.max_boxes:
            raise RefusalError(503, f"all {self._settings.max_boxes} boxes of this gateway are taken", RETRY_AFTER)
        slot = next(number for number in itertools.count() if number not in self._slots)
        self._slots.add(slot)
        return slot

    async def _boot(self, record: BoxRecord) -> BoxClient:
        directory = self._boxes_directory / record.id
        try:
            directory.mkdir(mode=0o700)
            box = BoxClient(directory, record)
        except OSError:  # no room, or no descriptor
            self._slots.discard(record.slot)
            raise
        try:
            assert self._fork_server is not None, "boxes are created after start"
            async with self._boots:
                seconds = COPY_SECONDS if record.spec["copies_image"] else BOOT_SECONDS
                latest = clock() + seconds + record.spec["ttl_seconds"]  # for a gateway that adopts the box
                box.save(record.model_copy(update={"deadline": latest}))
                boxd_pid = await self._fork_server.boot(directory, seconds)
            box.save(record.model_copy(update={"deadline": clock() + record.spec["ttl_seconds"]}))
            self._take_in(box, boxd_pid)
        except BaseException:
            self._discard(box, await self._end(box))
            raise
        return box

    async def _adopt_pending(self) -> None:
        while self._pending:
            await asyncio.sleep(_ADOPT_AGAIN_SECONDS)
            await asyncio.gather(*(self._try_adopting(name) for name in list(self._pending)))

    async def _try_adopting(self, name: str) -> None:
        """Adopt a box that outlived the previous gateway, or remove it if it is proven dead; else it stays pending."""
        try:
            await self._adopt(self._boxes_directory / name)
        except Exception as reason:  # any: a lack of descriptors, for example, says nothing about the box
            _log.warning("box_not_adopted_yet", directory=name, reason=repr(reason))
        else:
            del self._pending[name]

    async def _adopt(self, directory: Path) -> None:
        """Adopt a box, or remove what a dead one has left. Raises any error that does not prove its death."""
        if not directory.is_dir() or not _ID.fullmatch(directory.name):
            _log.info("leftover_removed", directory=directory.name, reason="not a box directory")
            if directory.exists():
                directory.rename(self._trash / directory.name)
            return
        with contextlib.ExitStack() as closing:
            box = None
            try:
                box = BoxClient(directory, BoxRecord.model_validate_json((directory / RECORD_FILE).read_bytes()))
                closing.callback(box.close)
                self._pending[box.id] = box.record
                self._slots.add(box.record.slot)
                self._take_in(box, await box.boxd_pid(_ADOPT_SECONDS))
                closing.pop_all()
            except (FileNotFoundError, ValueError, BoxFaultError, BoxNotFoundError) as reason:
                # A boxd that boots does not listen yet. One that hangs beyond its box's time to live is not waited for.
                is_over = box is not None and clock() >= box.record.deadline + _DESTROY_SECONDS
                has_boxd = bool(await asyncio.to_thread(box_end.boxd_pids, directory))
                if (isinstance(reason, BoxFaultError) or has_boxd) and not is_over:
                    raise
                _log.info("leftover_removed", directory=directory.name, reason=str(reason))
                if box is None:
                    if self._has_cgroups:
                        await asyncio.to_thread(cgroups.end_leftover, f"{self._cgroup_parent}/{directory.name}")
                    directory.rename(self._trash / directory.name)
                else:
                    if await self._end(box):
                        raise BoxFaultError("unavailable", "the box's processes have not ended") from reason
                    closing.pop_all()
                    self._discard(box)

    def _take_in(self, box: BoxClient, boxd_pid: int) -> None:
        box.boxd_fd = os.pidfd_open(boxd_pid)
        self._boxes[box.id] = box
        asyncio.get_running_loop().add_reader(box.boxd_fd, lambda: self._spawn(self.kill(box)))

    def _unwatch(self, box: BoxClient) -> None:
        if box.boxd_fd is not None:
            asyncio.get_running_loop().remove_reader(box.boxd_fd)

    async def _end(self, box: BoxClient) -> list[psutil.Process]:
        """End a box's processes, by force if its boxd does not; return those that have not ended."""
        try:
            await box.control(timeout_seconds=_DESTROY_SECONDS, op="destroy")
        except (BoxFaultError, BoxNotFoundError):
            alive = await asyncio.to_thread(box_end.kill_processes, box.open_directory, _DESTROY_SECONDS)
            group = str(box.record.spec["cgroup"])
            # Else a copied record: it is the original's group. An earlier gateway's may be below another one.
            if not group or group.split("/")[-2:] == [os.path.basename(self._cgroup_parent), box.id]:
                await asyncio.to_thread(cgroups.end_leftover, group)
            if box.record.spec.get("shares_ids"):
                return alive
            # Also those whose boxd an earlier gateway has ended.
            users = int(box.record.spec["uid_base"])
            others = await asyncio.to_thread(box_end.processes_of_users, users, NUM_IDS)
            return [*(process for process in alive if process not in others), *others]
        return []

    def _discard(self, box: BoxClient, alive: Sequence[psutil.Process] = ()) -> None:
        """Let a box's files be removed, and give its slot back, once those of its processes that live have ended."""
        if alive:
            _log.warning("box_not_ended_yet", box=box.id, processes=[process.pid for process in alive])
            with contextlib.suppress(OSError):  # a gateway that is started meanwhile ends the box again
                box.save(box.record.model_copy(update={"deadline": 0.0}))
            self._spawn(self._free_later(box, list(alive)))
        else:
            self._free(box)
        box.close()

    async def _free_later(self, box: BoxClient, alive: list[psutil.Process]) -> None:
        """Free a slot after the processes have ended: a new box would run with their user ids. Until then the box's
        record holds the slot, also for a gateway that is started meanwhile."""
        while await asyncio.to_thread(box_end.any_runs, alive):
            await asyncio.sleep(_REAP_SECONDS)
        self._free(box)

    def _free(self, box: BoxClient) -> None:
        self._slots.discard(box.record.slot)
        doomed = self._trash / box.id
        with contextlib.suppress(FileNotFoundError):  # something else has deleted it
            box.directory.rename(doomed)
            self._spawn(asyncio.to_thread(remove_tree, doomed))

    async def _reap_expired(self) -> None:
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            now = clock()
            for box in self.all():
                if now >= box.record.deadline:
                    _log.info("box_expired", box=box.id)
                    self._spawn(self.kill(box))

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _prepare_cgroups(parent: str) -> bool:
    """Return False without writable control groups: boxes run unlimited then, and `ratchet doctor` reports it."""
    try:
        cgroups.prepare_parent(parent, moves_processes=True)
    except OSError as error:
        _log.warning("boxes_without_limits", reason=str(error))
        return False
    return cgroups.usable_version() != 0


def _must_copy_images(directory: Path) -> bool:
    """Return whether overlays cannot be mounted here; `ratchet doctor` reports it."""
    if machine_probe.has_overlays(directory):
        return False
    _log.warning("boxes_copy_images", reason="overlays cannot be mounted", directory=str(directory))
    return True


def _prepare_disk(settings: GatewaySettings) -> str:
    """Return the path of the template for box disks, empty if none can be made; `ratchet doctor` reports the reason."""
    if settings.disk_bytes is None or not disk_template.is_possible():
        return ""
    template = settings.root_directory / f"disk-{settings.disk_bytes}.ext4"
    try:
        if not template.exists():
            disk_template.make_template(template, settings.disk_bytes)
    except OSError as error:
        _log.warning("boxes_without_disk_limit", reason=str(error))
        return ""
    return str(template.resolve())
