"""One vLLM server under our care: started on the newest published policy, registered, kept honest, ended without a trace.

Why here: a restarted vLLM would serve stale weights under a wrong label; the wrapper alone knows when it may be used.
Called by: `ratchet engine`, which the supervisor restarts when it ends with an error.

    start → end leftovers → vLLM up → probe → newest version loaded and labelled → `ready` → heartbeats, ends lapsed pauses
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import structlog

from engine import canary
from engine.client import EngineClient
from engine.policy_files import weight_files
from engine.process import EngineSettings, end_leftover_engines, port_taken, vllm_process
from engine.vllm_plugin import file_sha256
from ratchet.background_task import running_beside
from ratchet.errors import EngineRejectedError, EngineUnavailableError, MachineError, StoreUnavailableError
from ratchet.store import engines
from ratchet.store.database import Database
from ratchet.store.engines import PublishedPolicy
from ratchet.types import EngineState

_LOG = structlog.get_logger("ratchet.engine")
HEARTBEAT_SECONDS = 2.0
START_SECONDS = 1800.0
RECOVERY_LEASE_SECONDS = 600.0
HUNG_SECONDS = 120.0


async def run_engine(settings: EngineSettings) -> None:
    """Runs until SIGTERM or SIGINT (returns), or until vLLM dies (raises EngineUnavailableError, for the supervisor to start anew).

    Raises MachineError where the port is taken by someone else or vLLM lacks a route.
    """
    database = Database(settings.database_url, pool_size=2)
    client = EngineClient(settings.address)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await database.wait()
        await _Wrapper(settings, database, client, stop).run()
    finally:
        await client.close()
        await database.close()


class _Wrapper:
    def __init__(self, settings: EngineSettings, database: Database, client: EngineClient, stop: asyncio.Event) -> None:
        self.settings, self.database, self.client, self.stop = settings, database, client, stop
        self.canary: dict[str, Any] | None = None  # of the version that we loaded last
        self.serving: str | None = (
            None  # the version that we loaded last; `engine/weight_update.py` may have loaded newer ones since
        )
        self.up = False
        self.pausing = False  # a pause of our own is leased
        self.heard_at = self.healthy_at = (
            time.monotonic()
        )  # the last heartbeat that was written, the last answer of vLLM

    async def run(self) -> None:
        await asyncio.to_thread(end_leftover_engines, self.settings)
        if port_taken(self.settings.host, self.settings.port):
            raise MachineError(
                f"port {self.settings.port} of {self.settings.host} is taken by another program; choose another engine port"
            )
        async with self.database.begin() as conn:
            details: dict[str, Any] = {
                "pid": os.getpid(),
                "started_at": time.time(),
                "max_num_seqs": self.settings.max_num_seqs,
            }
            details["max_model_len"] = self.settings.max_model_len
            self.engine_id = await engines.register_engine(
                conn, self.settings.address, str(self.settings.model_path), details
            )
        try:
            await self._serve()
        finally:
            with contextlib.suppress(StoreUnavailableError):
                async with self.database.begin() as conn:
                    await engines.set_engine_gone(conn, self.engine_id)

    async def _serve(self) -> None:
        policy = await self._newest(await self._published())
        model = _directory(policy) if policy else self.settings.model_path
        _LOG.info(
            "engine starts", model=str(model), version=policy.version if policy else None, address=self.settings.address
        )
        async with vllm_process(self.settings, model) as process:
            died = asyncio.create_task(process.wait())
            stopped = asyncio.create_task(self.stop.wait())
            work = asyncio.create_task(self._work(policy))
            done, _ = await asyncio.wait({died, stopped, work}, return_when=asyncio.FIRST_COMPLETED)
            for task in (died, stopped, work):
                task.cancel()
            if work in done:
                work.result()
            if died in done and not self.stop.is_set():
                raise EngineUnavailableError(f"vLLM at {self.settings.address} ended with status {process.returncode}")

    async def _work(self, started_from: PublishedPolicy | None) -> None:
        await self._healthy()
        self.up = True
        await self.client.probe()
        await self.client.init_weight_transfer(str(self.settings.policies_root))
        if started_from:
            await self.client.set_version(started_from.version)
            self.serving, self.canary = started_from.version, started_from.canary
        # A version may have been published while vLLM started: catch up before `ready`, and look once more after it, since
        # the sync of a version published in between has not seen this engine.
        await self._catch_up()
        await self._set_ready(EngineState.STARTING)
        await self._catch_up_if_ready()
        while True:
            await self._beat()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not await self.client.health():
            if asyncio.get_running_loop().time() > deadline:
                raise EngineUnavailableError(f"vLLM at {self.settings.address} was not up after {START_SECONDS:.0f} s")
            await self._beat()
            await asyncio.sleep(0.5)

    async def _beat(self) -> None:
        """One heartbeat. Silence is the truth while the server hangs or the store is away. Raises EngineUnavailableError where vLLM
        has not answered for so long that only a new one helps."""
        if self.up and not await self.client.health():
            if time.monotonic() - self.healthy_at > HUNG_SECONDS:
                raise EngineUnavailableError(
                    f"vLLM at {self.settings.address} has not answered for {HUNG_SECONDS:.0f} s: it is started anew"
                )
            return
        self.healthy_at = time.monotonic()
        try:
            if self.up and time.monotonic() - self.heard_at > engines.SILENT_SECONDS:
                await self._return()
            async with self.database.begin() as conn:
                row = await engines.heartbeat_engine(conn, self.engine_id)
            self.heard_at = time.monotonic()
            if row is not None and row.state is EngineState.QUARANTINED and self.up:
                raise EngineUnavailableError(
                    f"quarantined ({(row.details.get('canary') or {}).get('reason')}): vLLM is started anew"
                )
            lapsed = row is not None and row.state is EngineState.SYNCING and (row.pause_seconds_left or -1) < 0
            if lapsed:
                await self._recover()
        except StoreUnavailableError as error:
            _LOG.warning("no heartbeat", reason=str(error))

    async def _return(self) -> None:
        """After a silence in which weights may have been published without us: the newest ones first, then the next heartbeat."""
        async with self.database.begin() as conn:
            row = await engines.get_engine(conn, self.engine_id)
        if row is not None and row.state is EngineState.READY:
            self.serving = row.version
            await self._catch_up_if_ready()
        elif self.pausing:  # the store went away once more while we caught up
            await self._catch_up()
            await self._set_ready(EngineState.SYNCING)
            self.pausing = False

    async def _recover(self) -> None:
        """Ends a pause that its holder abandoned. Which weights it left is unknown, so the newest ones are loaded first."""
        async with self.database.begin() as conn:
            if not await engines.take_over_engine_pause(conn, self.engine_id, RECOVERY_LEASE_SECONDS):
                return
        _LOG.warning("the pause's lease has run out; loading the newest policy and resuming")
        async with running_beside(self._stay_heard()):
            await self._load_again()
        await self._set_ready(EngineState.SYNCING)

    async def _load_again(self) -> None:
        await self.client.pause()
        policy = await self._newest(await self._published())
        if policy:
            await self._load(policy)
        elif (label := await self.client.version()) is not None:
            raise EngineUnavailableError(
                f"an abandoned update left unknown weights under {label!r} and no published policy can be read"
            )
        await self.client.resume()

    async def _catch_up(self) -> None:
        async with running_beside(self._stay_heard()):
            while (policy := await self._newest(await self._published())) and policy.version != self.serving:
                await self.client.pause()
                await self._load(policy)
                await self.client.resume()

    async def _stay_heard(self) -> None:
        """Heartbeats beside a load: a large policy takes longer than an engine may be silent, and its calls wait for it, paused."""
        while True:
            if await self.client.health():
                with contextlib.suppress(StoreUnavailableError):
                    async with self.database.begin() as conn:
                        await engines.heartbeat_engine(conn, self.engine_id)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _catch_up_if_ready(self) -> None:
        policies = await self._published()
        if not policies or policies[0].version == self.serving:
            return
        async with self.database.begin() as conn:
            self.pausing = await engines.begin_engine_pause(conn, self.engine_id, RECOVERY_LEASE_SECONDS)
        if self.pausing:
            await self._catch_up()
            await self._set_ready(EngineState.SYNCING)
            self.pausing = False

    async def _load(self, policy: PublishedPolicy) -> None:
        """The four phases; vLLM is paused. An update that was left open by another is closed first."""
        try:
            await self.client.start_update()
        except (EngineUnavailableError, EngineRejectedError):
            await self.client.finish_update(None)
            await self.client.start_update()
        directory, root = _directory(policy).resolve(), self.settings.policies_root.resolve()
        if not directory.is_relative_to(root):
            raise MachineError(
                f"policy {policy.version} lies in {directory}, outside of {root}; start the engine with the root it was published to"
            )
        base = directory.relative_to(root)
        weights = weight_files(policy.files)
        await self.client.update([str(base / file["name"]) for file in weights], [file["sha256"] for file in weights])
        await self.client.finish_update(policy.version)
        self.serving, self.canary = policy.version, policy.canary
        _LOG.info("policy loaded", version=policy.version)

    async def _set_ready(self, expected: EngineState) -> None:
        """Only an engine that answers as the learner does takes calls. Raises EngineUnavailableError where it does not."""
        if self.canary is not None:
            verdict = canary.judge_canary(await self.client.score(self.canary["ids"]), self.canary, None)
            if verdict.reason is not None:
                raise EngineUnavailableError(
                    f"the engine does not serve {self.serving}: {verdict.reason}; it is started anew"
                )
        async with self.database.begin() as conn:
            await engines.set_engine_version(conn, self.engine_id, self.serving)
            changed = await engines.set_engine_state(conn, self.engine_id, expected, EngineState.READY)
        if changed:
            _LOG.info("engine ready", version=self.serving, address=self.settings.address)

    async def _published(self) -> list[PublishedPolicy]:
        async with self.database.begin() as conn:
            return await engines.newest_published_policies(conn)

    async def _newest(self, policies: list[PublishedPolicy]) -> PublishedPolicy | None:
        """The first whose files are all there and have their digests: a torn directory must not be served under a good label."""
        for policy in policies:
            if policy.version == self.serving or await asyncio.to_thread(_intact, policy):
                return policy
            _LOG.error("policy cannot be served: files are missing or differ", version=policy.version, uri=policy.uri)
        return None


def _directory(policy: PublishedPolicy) -> Path:
    return Path(policy.uri.removeprefix("file://"))


def _intact(policy: PublishedPolicy) -> bool:
    files = [(_directory(policy) / file["name"], file["sha256"]) for file in policy.files]
    return bool(files) and all(path.is_file() and file_sha256(path) == digest for path, digest in files)
