"""New weights from the learner to all engines at once, over NCCL: one reader of the files instead of hundreds.

Why here: a file system that every engine reads at the same moment is what breaks first (docs/scaling.md). The files stay the truth: an engine
that misses this reads them, as one does that starts later, and whatever goes wrong here costs time and nothing else.
Called by: `training/ray_driver.py` on rank 0, where `training.weight_transport` is nccl. Follows vLLM 0.32's
NCCLTrainerWeightTransferEngine, which knows one engine and neither pause, label nor canary. Not yet measured: it has never met a GPU.

    files and row published ─▶ ready engines ─▶ one group ─▶ every engine paused, update begun ─▶ broadcast ─▶ labelled, resumed, examined
                                                                 │ one drops out: nothing is sent, the others read the files
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog

from engine.client import EngineClient
from engine.policy_files import weight_files
from engine.vllm_plugin import read_tensors
from engine.weight_update import load_from_files, update_engine
from ratchet.errors import RatchetError
from ratchet.store import engines
from ratchet.store.database import Database
from ratchet.store.engines import EngineRow
from ratchet.store.schema import PolicyVersionTable

_LOG = structlog.get_logger()

_JOIN_SECONDS = 45
"""Engines generate nothing from the moment they are told to join until all have: less than the time limit of their next pause."""
_SEND_SECONDS = 600.0
_GRACE_SECONDS = 10.0
"""For a broadcast under which an engine has failed: it ends now, or never."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class BroadcastGroup(Protocol):
    """The sending end; its calls block."""

    def open(self, address: str, port: int, world_size: int) -> None:
        """Returns once all other ranks have joined at `address`; whatever it raises lets those that have joined go."""

    def broadcast(self, files: Sequence[Path]) -> None:
        """All tensors of these safetensors files, in the order of `described`."""

    def close(self) -> None:
        """Also from another thread, while a broadcast hangs."""


class NcclBroadcastGroup:
    """Rank 0, on a GPU that no engine uses: NCCL refuses two ranks on one. Raises ImportError where vLLM is not installed."""

    def __init__(self, device: int) -> None:
        import vllm.distributed.weight_transfer.packed_tensor  # noqa: F401 (ten seconds, which no engine should stand still for)

        self.device = device
        self.communicator: Any = None

    def open(self, address: str, port: int, world_size: int) -> None:
        """What vLLM's `trainer_init` does, with a time limit of our own."""
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        torch.cuda.set_device(self.device)  # of this thread
        meeting = StatelessProcessGroup.create(
            address, port, rank=0, world_size=world_size, store_timeout=_JOIN_SECONDS
        )
        with unpinned_nccl_env():
            self.communicator = PyNcclCommunicator(meeting, device=self.device)

    def broadcast(self, files: Sequence[Path]) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self.device)
        on_gpu = ((name, tensor.to("cuda")) for name, tensor in read_tensors(files))
        packed_nccl_broadcast_producer(
            iterator=on_gpu, group=self.communicator, src=0, post_iter_func=lambda item: item[1]
        )

    def close(self) -> None:
        if self.communicator is not None:
            self.communicator.destroy()
            self.communicator = None


class WeightBroadcast:
    """Keeps the group while the same engines are there, makes a new one where they are others, and gives up for good after a group or a
    broadcast that failed: its cause seldom goes away, and each try keeps engines from their work.
    """

    def __init__(self, group: BroadcastGroup, root: Path) -> None:
        """`root`: the directory below which policies are published, as this machine sees it."""
        self.group, self.root = group, root
        self.members: list[tuple[int, Any]] = []
        self.given_up = False

    async def send(self, database: Database, version: PolicyVersionTable, keep_cache: bool) -> None:
        """Every ready engine serves `version` afterwards, or is left to `learn.sync` and its wrapper. Raises StoreUnavailableError alone."""
        if self.given_up:
            return
        async with database.begin() as connection:
            ready = [engine for engine in await engines.ready_engines(connection) if engine.version != version.version]
        sizes = {
            engine.id: size for engine, size in zip(ready, await asyncio.gather(*map(_num_workers, ready)), strict=True)
        }
        found = [engine for engine in ready if sizes[engine.id]]
        try:
            if found:
                await self._join(found, sizes)
                await self._send(found, database, version, keep_cache)
        except Exception as error:  # whatever it is, the files are there
            _LOG.error(
                "weights are no longer sent; the engines read the files", version=version.version, reason=repr(error)
            )
            self.given_up = True
            self.close()

    def close(self) -> None:
        self.members = []
        self.group.close()

    async def _join(self, found: Sequence[EngineRow], sizes: dict[int, int]) -> None:
        """One group of these engines and ourselves."""
        members = [(engine.id, engine.details.get("started_at")) for engine in found]
        if members == self.members:
            return
        self.close()
        address, port, world_size = (
            _address_towards(found[0].address),
            _free_port(),
            1 + sum(sizes[engine.id] for engine in found),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_in_thread(lambda: self.group.open(address, port, world_size), _JOIN_SECONDS))
            offset = 1
            for engine in found:
                where = {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": world_size,
                    "packed": True,
                }
                tasks.create_task(_tell(engine, where))
                offset += sizes[engine.id]
        self.members = members

    async def _send(
        self, found: Sequence[EngineRow], database: Database, version: PolicyVersionTable, keep_cache: bool
    ) -> None:
        files = [Path(version.uri) / file["name"] for file in weight_files(version.files)]
        names, dtypes, shapes = described(files)
        loop = asyncio.get_running_loop()
        num_begun = 0
        all_begun: asyncio.Future[bool] = loop.create_future()  # decided once, for everybody
        one_failed: asyncio.Future[None] = loop.create_future()

        async def receive(client: EngineClient) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == len(found) and not all_begun.done():
                all_begun.set_result(True)
            if await asyncio.shield(all_begun):
                await client.receive(names, dtypes, shapes)
            else:
                await load_from_files(version, self.root)(client)

        async def take(engine: EngineRow) -> None:
            try:
                await update_engine(database, engine, version, receive, keep_cache)
            except Exception as error:  # one engine's trouble is not the others'
                _LOG.warning("weights not sent", engine=engine.address, version=version.version, reason=repr(error))
                if not one_failed.done():
                    one_failed.set_result(None)
                if not all_begun.done():
                    all_begun.set_result(False)

        async def broadcast() -> None:
            if not await asyncio.shield(all_begun):
                return
            sending = asyncio.create_task(_in_thread(lambda: self.group.broadcast(files), _SEND_SECONDS))
            await asyncio.wait({sending, one_failed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait_for(sending, None if sending.done() else _GRACE_SECONDS)

        taking = [asyncio.create_task(take(engine)) for engine in found]
        try:
            await broadcast()
        except BaseException:
            for task in (
                taking
            ):  # their pauses run out, and their wrappers bring them to the files, or start a vLLM anew that hangs
                task.cancel()
            raise
        finally:
            await asyncio.gather(*taking, return_exceptions=True)
        if one_failed.done():
            self.close()  # an engine that has left the middle of a broadcast must not find the rest of it in the next


async def _num_workers(engine: EngineRow) -> int:
    """0 for an engine that does not answer."""
    async with EngineClient(engine.address) as client:
        try:
            return await client.num_workers()
        except RatchetError:
            return 0


async def _tell(engine: EngineRow, where: dict[str, Any]) -> None:
    async with EngineClient(engine.address) as client:
        await client.init_weight_transfer(nccl=where)


def described(files: Sequence[Path]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, torch's names of the dtypes and shapes of all tensors, in the order in which they are sent; no tensor is read.

    Raises ValueError for a dtype that no policy is published in.
    """
    from safetensors import safe_open

    names, dtypes, shapes = [], [], []
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                names.append(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{path}: {name} has dtype {part.get_dtype()}; weights are sent as {', '.join(_DTYPES)}"
                    )
                dtypes.append(_DTYPES[part.get_dtype()])
                shapes.append(list(part.get_shape()))
    return names, dtypes, shapes


async def _in_thread(work: Callable[[], None], seconds: float) -> None:
    """In a thread that nobody waits for at the end: a call that hangs in NCCL can only be left behind."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(seconds):
        await done


def _address_towards(url: str) -> str:
    """Our address as the machine behind `url` sees it; nothing is sent."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
