"""Broadcast new weights from the learner to all ready engines at once, over NCCL.

Hundreds of engines that read the same files at the same moment overload the file system first (docs/fleet.md). The
files stay authoritative: an engine that misses a broadcast reads them, as an engine that starts later does, so that a
failure here costs time only. The learner's rank 0 uses this if `training.weight_transport` is nccl. It follows vLLM
0.32's NCCLTrainerWeightTransferEngine, which handles one engine and has no pause, label or canary. It has not run on
a GPU yet.

    files and row published -> ready engines -> one group -> every engine paused, update started -> broadcast
                            -> labelled, resumed, canary (`engine/weight_update.py`)
    If one engine fails before the broadcast, nothing is sent and the others read the files.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import structlog

from engine.client import EngineClient
from engine.policy_files import policy_directory, weight_files
from engine.vllm_plugin import read_tensors
from engine.weight_update import load_from_files, update_engine
from ratchet.background_task import in_abandonable_thread
from ratchet.config_engines import DEFAULT_SET
from ratchet.errors import RatchetError
from ratchet.types import JsonObject
from store import engines
from store.database import Database
from store.engines import EngineRow
from store.schema import PolicyVersionTable

_LOG = structlog.get_logger()

_JOIN_SECONDS = 45
"""Time limit for joining the group. Engines generate nothing until all have joined; below the lease of a pause."""
_SEND_SECONDS = 600.0
_GRACE_SECONDS = 10.0
"""Time left for a broadcast to end after an engine has failed in it; NCCL would otherwise wait for ever."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Torch's name of each safetensors dtype that policies are published in."""


class TensorList(NamedTuple):
    """Names, torch dtype names and shapes of tensors, in the order in which they are sent."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class BroadcastGroup(Protocol):
    """The sending end of a group; its calls block."""

    def open(self, address: str, port: int, world_size: int) -> None:
        """Return once all other ranks have joined at `address`. If it raises, the ranks that joined are released."""

    def broadcast(self, files: Sequence[Path]) -> None:
        """Send all tensors of these safetensors files, in the order of `describe_tensors`."""

    def close(self) -> None:
        """Close the group, also from another thread while a broadcast hangs."""


class NcclBroadcastGroup:
    """Rank 0 of an NCCL group, on a GPU that no engine uses: NCCL refuses two ranks on one GPU."""

    def __init__(self, device: int) -> None:
        """Raises ImportError if vLLM is not installed. The import takes ten seconds, so it is done before any pause."""
        import vllm.distributed.weight_transfer.packed_tensor  # noqa: F401

        self.device = device
        self._communicator: Any = None

    def open(self, address: str, port: int, world_size: int) -> None:
        """Do what vLLM's `trainer_init` does, with a time limit of _JOIN_SECONDS."""
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        torch.cuda.set_device(self.device)  # of this thread
        process_group = StatelessProcessGroup.create(
            address, port, rank=0, world_size=world_size, store_timeout=_JOIN_SECONDS
        )
        with unpinned_nccl_env():
            self._communicator = PyNcclCommunicator(process_group, device=self.device)

    def broadcast(self, files: Sequence[Path]) -> None:
        """Send the tensors in vLLM's packed form."""
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self.device)
        on_gpu = ((name, tensor.to("cuda")) for name, tensor in read_tensors(files))
        packed_nccl_broadcast_producer(
            iterator=on_gpu, group=self._communicator, src=0, post_iter_func=lambda item: item[1]
        )

    def close(self) -> None:
        """Destroy the communicator."""
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


class WeightBroadcast:
    """Sends versions to engines. The group is kept as long as the same engines are ready, and made anew if others are.

    After a group or a broadcast that failed, nothing is sent any more: the cause rarely goes away, and every try keeps
    engines from generating.
    """

    def __init__(self, group: BroadcastGroup, root: Path, engine_set: str = DEFAULT_SET) -> None:
        """`root`: the directory below which policies are published, on this machine. `engine_set`: whose engines get
        the versions."""
        self.group = group
        self.root = root
        self.engine_set = engine_set
        self.given_up = False
        self._members: list[tuple[int, Any]] = []  # (engine id, start time)

    async def send(self, database: Database, version: PolicyVersionTable, keep_cache: bool) -> None:
        """Bring every ready engine of the set to `version`; those that fail are left to `learn.sync` and their wrapper.

        Raises StoreUnavailableError only.
        """
        if self.given_up:
            return
        of_set = await database.run(engines.ready_engines, self.engine_set)
        ready = [engine for engine in of_set if engine.version != version.version]
        counts = await asyncio.gather(*map(_num_workers, ready))
        num_workers = {engine.id: count for engine, count in zip(ready, counts, strict=True)}
        answering = [engine for engine in ready if num_workers[engine.id]]
        if not answering:
            return
        try:
            await self._join(answering, num_workers)
            files = [policy_directory(version.uri, self.root) / file["name"] for file in weight_files(version.files)]
            one_broadcast = _Broadcast(self.group, self.root, database, version, files, keep_cache, len(answering))
            if not await one_broadcast.run(answering):
                # An engine that left in the middle of a broadcast must not receive the rest of it in the next one.
                self.close()
        except Exception as error:  # any failure is harmless: engines read the files
            _LOG.error(
                "weights are no longer sent; the engines read the files", version=version.version, reason=repr(error)
            )
            self.given_up = True
            self.close()

    def close(self) -> None:
        """Close the group."""
        self._members = []
        self.group.close()

    async def _join(self, found: Sequence[EngineRow], num_workers: dict[int, int]) -> None:
        """Make one group of the learner, as rank 0, and all workers of these engines, unless it exists already."""
        members = [(engine.id, engine.details.get("started_at")) for engine in found]
        if members == self._members:
            return
        self.close()
        address = _address_towards(found[0].address)
        port = _free_port()
        world_size = 1 + sum(num_workers[engine.id] for engine in found)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(in_abandonable_thread(lambda: self.group.open(address, port, world_size), _JOIN_SECONDS))
            rank_offset = 1
            for engine in found:
                nccl = {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": rank_offset,
                    "world_size": world_size,
                    "packed": True,
                }
                tasks.create_task(_join_engine(engine, nccl))
                rank_offset += num_workers[engine.id]
        self._members = members


@dataclass
class _Broadcast:
    """One version on its way to several engines.

    Each engine runs the whole update (`update_engine`) in a task of its own. Its transfer waits on `_all_started` until
    every engine is paused with its update started: True starts the broadcast, and False, set by the first failure,
    lets every engine read the files instead.
    """

    group: BroadcastGroup
    root: Path
    database: Database
    version: PolicyVersionTable
    files: Sequence[Path]
    keep_cache: bool
    num_waited_for: int

    def __post_init__(self) -> None:
        self.tensors = describe_tensors(self.files)
        self._all_started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._one_failed = asyncio.Event()

    async def run(self, found: Sequence[EngineRow]) -> bool:
        """Update all engines; return whether none failed. Raises what the broadcast raises.

        If the broadcast fails, the updates are cancelled. Their pauses lapse, and their wrappers load the files, or
        restart a vLLM that hangs.
        """
        updates = [asyncio.create_task(self._update(engine)) for engine in found]
        try:
            if await asyncio.shield(self._all_started):
                await self._send()
        except BaseException:
            for task in updates:
                task.cancel()
            raise
        finally:
            await asyncio.gather(*updates, return_exceptions=True)
        return not self._one_failed.is_set()

    async def _update(self, engine: EngineRow) -> None:
        try:
            await update_engine(self.database, engine, self.version, self._transfer, self.keep_cache)
        except Exception as error:  # one engine's failure must not stop the others
            _LOG.warning("weights not sent", engine=engine.address, version=self.version.version, reason=repr(error))
            self._one_failed.set()
            if not self._all_started.done():
                self._all_started.set_result(False)

    async def _transfer(self, client: EngineClient) -> None:
        """Receive the tensors once every engine waits for them, or read the files if one has failed."""
        self.num_waited_for -= 1
        if self.num_waited_for == 0 and not self._all_started.done():
            self._all_started.set_result(True)
        if await asyncio.shield(self._all_started):
            await client.receive(self.tensors.names, self.tensors.dtypes, self.tensors.shapes)
        else:
            await load_from_files(self.version, self.root)(client)

    async def _send(self) -> None:
        """Send the tensors. After an engine has failed, allow _GRACE_SECONDS. Raises TimeoutError and NCCL's errors."""
        sending = asyncio.create_task(in_abandonable_thread(lambda: self.group.broadcast(self.files), _SEND_SECONDS))
        failed = asyncio.create_task(self._one_failed.wait())
        try:
            await asyncio.wait({sending, failed}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait_for(sending, None if sending.done() else _GRACE_SECONDS)
        finally:
            failed.cancel()


async def _num_workers(engine: EngineRow) -> int:
    """Return the number of vLLM processes that hold weights, or 0 if the engine does not answer."""
    async with EngineClient(engine.address) as client:
        try:
            return await client.num_workers()
        except RatchetError:
            return 0


async def _join_engine(engine: EngineRow, nccl: JsonObject) -> None:
    async with EngineClient(engine.address) as client:
        await client.init_weight_transfer(nccl=nccl)


def describe_tensors(files: Sequence[Path]) -> TensorList:
    """Describe all tensors of safetensors files without reading them.

    Raises ValueError for a dtype that no policy is published in.
    """
    from safetensors import safe_open

    tensors = TensorList([], [], [])
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{path}: {name} has dtype {tensor.get_dtype()}; weights are sent as {', '.join(_DTYPES)}"
                    )
                tensors.names.append(name)
                tensors.dtypes.append(_DTYPES[tensor.get_dtype()])
                tensors.shapes.append(list(tensor.get_shape()))
    return tensors


def _address_towards(url: str) -> str:
    """Return this machine's address as the machine behind `url` sees it. Sends nothing."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
