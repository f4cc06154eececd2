"""New weights straight from the learner's GPU into all engines at once, over NCCL.

Why here: a file system that hundreds of engines read at the same moment is what breaks first (docs/scaling.md). The files are published all
the same, and stay the truth: an engine that misses this reads them, as one does that starts later.
Called by: `training/ray_learner.py` on rank 0, where `training.weight_transport` is nccl. Follows vLLM 0.32's
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

from ratchet.engine_client import EngineClient
from ratchet.errors import RatchetError
from ratchet.store import engines
from ratchet.store.database import Database
from ratchet.store.schema import PolicyVersion
from training.sync import bring, from_files
from training.vllm_plugin import tensors

log = structlog.get_logger()

_JOIN_SECONDS = 120.0
_SEND_SECONDS = 600.0
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Group(Protocol):
    """The sending end; its calls block."""

    def open(self, address: str, port: int, world_size: int) -> None:
        """Returns once all other ranks have joined at `address`."""

    def broadcast(self, files: Sequence[Path]) -> None:
        """All tensors of these safetensors files, in the order of `described`."""

    def close(self) -> None: ...


class NcclGroup:
    """Rank 0, on a GPU of its own: NCCL refuses two ranks on one."""

    def __init__(self, device: int) -> None:
        self.device, self.communicator = device, None

    def open(self, address: str, port: int, world_size: int) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(self.device)  # of this thread
        self.communicator = trainer_init({"master_address": address, "master_port": port, "world_size": world_size})

    def broadcast(self, files: Sequence[Path]) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        torch.cuda.set_device(self.device)
        on_gpu = ((name, tensor.to("cuda")) for name, tensor in tensors(files))
        packed_nccl_broadcast_producer(iterator=on_gpu, group=self.communicator, src=0, post_iter_func=lambda item: item[1])

    def close(self) -> None:
        communicator: Any = self.communicator
        if communicator is not None:
            communicator.destroy()
            self.communicator = None


class Push:
    """Keeps the group while the same engines are there, and makes a new one where they are others."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.members: list[tuple[int, Any]] = []

    async def send(self, database: Database, version: PolicyVersion, keep_cache: bool) -> None:
        """Every ready engine serves `version` afterwards, or is left to `learn.sync` and its wrapper.

        Raises an ExceptionGroup with a TimeoutError where a broadcast that has begun does not end: an engine has died under it, and NCCL
        waits for ever. The learner must be started anew then; the engines' pauses run out, and their wrappers end a vLLM that hangs.
        """
        async with database.begin() as connection:
            found = [engine for engine in await engines.ready_engines(connection) if engine.version != version.version]
        if not found or not await self._join(found):
            return
        files = [Path(version.uri) / file["name"] for file in version.files if file["name"].endswith(".safetensors")]
        names, dtypes, shapes = described(files)
        num_begun = 0
        all_begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # decided once, for everybody

        async def receive(client: EngineClient) -> None:
            nonlocal num_begun
            num_begun += 1
            if num_begun == len(found) and not all_begun.done():
                all_begun.set_result(True)
            if await asyncio.shield(all_begun):
                await client.receive(names, dtypes, shapes)
            else:
                await from_files(version)(client)

        async def take(engine: engines.EngineRow) -> None:
            try:
                await bring(database, engine, version, receive, keep_cache)
            except RatchetError as error:
                log.warning("weights not sent", engine=engine.address, version=version.version, reason=str(error))
            finally:
                if not all_begun.done():
                    all_begun.set_result(False)

        async def broadcast() -> None:
            if await asyncio.shield(all_begun):
                await _in_thread(lambda: self.group.broadcast(files), _SEND_SECONDS)

        async with asyncio.TaskGroup() as tasks:
            for work in (broadcast(), *map(take, found)):
                tasks.create_task(work)

    async def _join(self, found: Sequence[engines.EngineRow]) -> bool:
        """Whether these engines and we are in one group now."""
        members = [(engine.id, engine.details.get("started_at")) for engine in found]
        if members == self.members:
            return True
        self.members = []
        self.group.close()
        try:
            async with contextlib.AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(EngineClient(engine.address)) for engine in found]
                sizes = await asyncio.gather(*(client.num_workers() for client in clients))
                address, port, world_size = _address_towards(found[0].address), _free_port(), 1 + sum(sizes)
                joining, offset = [], 1
                for client, size in zip(clients, sizes, strict=True):
                    rank = {"rank_offset": offset, "world_size": world_size, "packed": True}
                    where = {"master_address": address, "master_port": port}
                    joining.append(client.init_weight_transfer(nccl=where | rank))
                    offset += size
                opening = _in_thread(lambda: self.group.open(address, port, world_size), _JOIN_SECONDS)
                await asyncio.gather(opening, *joining)
        except (RatchetError, OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            log.warning("no NCCL group; the engines read the files", engines=len(found), reason=str(error) or type(error).__name__)
            return False
        self.members = members
        return True


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
                    raise ValueError(f"{path}: {name} has dtype {part.get_dtype()}; weights are sent as {', '.join(_DTYPES)}")
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
