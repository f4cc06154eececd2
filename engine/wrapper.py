"""The engine wrapper: supervise one vLLM process. Start it, register it, keep its weights current, stop it.

A vLLM that already runs (`is_attached`) is only registered, and its weights are kept current. An engine that several
runs share has a slot per run, and each is kept current.

A restarted vLLM would serve old weights under a wrong label, so only the wrapper decides when its engine is ready. The
states and who may change them are in `engine/weight_update.py`.

    end leftovers -> start vLLM -> probe its routes -> load and label the newest version -> ready
                  -> heartbeat every 5 s, which also takes over a lapsed pause
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

import structlog

from engine.client import EngineClient
from engine.policy_fetcher import PolicyFetcher
from engine.policy_files import policy_directory, whole_model
from engine.process import EngineSettings, end_leftover_engines, port_taken, vllm_process
from engine.weight_update import load_from_files, replace_weights, score_canary
from ratchet.background_task import errors_logged, running_beside, stop_event
from ratchet.errors import EngineUnavailableError, MachineError, StoreUnavailableError
from ratchet.lora_slots import FIRST_SLOT, label_of_versions, label_with, versions_of_label
from ratchet.types import EngineState, JsonObject
from store import engines
from store.database import Database
from store.engines import EngineRow, PublishedPolicy
from store.migration import wait_for_schema

_LOG = structlog.get_logger("ratchet.engine")
HEARTBEAT_SECONDS = 5.0
START_SECONDS = 1800.0
"""Time limit for vLLM to load its model and answer."""
RECOVERY_LEASE_SECONDS = 600.0
"""Lease of a pause that the wrapper takes for itself."""
UNRESPONSIVE_SECONDS = 120.0
"""A vLLM that has not answered for this long is ended and started again."""


async def run_engine(settings: EngineSettings) -> None:
    """Run an engine until SIGTERM or SIGINT.

    Raises EngineUnavailableError if vLLM dies or must be started again, which the supervisor does. Raises MachineError
    if the port is taken by another program or vLLM lacks a route.
    """
    database = Database(settings.database_url, pool_size=2)
    client = EngineClient(settings.address)
    try:
        await wait_for_schema(database)
        await EngineWrapper(settings, database, client, stop_event()).run()
    finally:
        await client.close()
        await database.close()


class EngineWrapper:
    """The supervision of one vLLM process.

    `loaded`: the version of each slot that has one, as the wrapper itself loaded it last or has read it from the row;
    `learn.sync` may have loaded newer ones. `canaries`: the learner's scores for those that the
    wrapper has loaded. `heartbeat_at` and `answered_at`: times of the last written heartbeat and of the last answer of
    vLLM, monotonic clock.
    """

    def __init__(self, settings: EngineSettings, database: Database, client: EngineClient, stop: asyncio.Event) -> None:
        self.settings = settings
        self.database = database
        self.client = client
        self.stop = stop
        self.engine_id = 0
        self.fetcher = PolicyFetcher(database, settings.policies_root, settings.engine_set, settings.slots)
        self.is_up = False
        self.holds_pause = False
        self.loaded: dict[int, str] = {}
        self.canaries: dict[int, JsonObject] = {}
        self.heartbeat_at = time.monotonic()
        self.answered_at = self.heartbeat_at

    async def run(self) -> None:
        """Register the engine, run vLLM, and mark the engine as gone at the end."""
        if not self.settings.is_attached:
            await self._require_port()
        details = {
            "pid": os.getpid(),
            "started_at": time.time(),
            "max_num_seqs": self.settings.max_num_seqs,
            "max_model_len": self.settings.max_model_len,
            engines.CHECKS_FILES: self.settings.checks_files,
        }
        async with self.database.begin() as conn:
            self.engine_id = await engines.register_engine(
                conn, self.settings.address, str(self.settings.model_path), details, self.settings.engine_set
            )
        self.fetcher.engine_id = self.engine_id
        try:
            await (self._attach() if self.settings.is_attached else self._run_vllm())
        finally:
            with contextlib.suppress(StoreUnavailableError):
                await self.database.run(engines.set_engine_gone, self.engine_id)

    async def _require_port(self) -> None:
        """End what an earlier wrapper has left. Raises MachineError if another program has the port."""
        await asyncio.to_thread(end_leftover_engines, self.settings)
        if port_taken(self.settings.host, self.settings.port):
            raise MachineError(
                f"port {self.settings.port} of {self.settings.host} is taken by another program; "
                "choose another engine port"
            )

    async def _attach(self) -> None:
        """Serve with the vLLM that already runs until a signal, which leaves it running."""
        _LOG.info("engine is registered", address=self.settings.address)
        stopped = asyncio.create_task(self.stop.wait())
        work = asyncio.create_task(self._serve({}))
        done, _ = await asyncio.wait({stopped, work}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, work):
            task.cancel()
        await asyncio.wait({stopped, work})
        if work in done:
            work.result()

    async def _run_vllm(self) -> None:
        """Run vLLM on the newest version of the first slot that has one, until a signal. Raises EngineUnavailableError
        if it ends by itself.

        If that is an adapter, vLLM starts from its base, and the adapter is loaded as a newer version.
        """
        choosing = asyncio.create_task(self._newest_versions(only_first=True))
        if not await self._ends_before_stop(choosing):
            return
        slot, policy = next(iter(choosing.result().items()), (FIRST_SLOT, None))
        directory = policy_directory(policy.uri, self.settings.policies_root) if policy else self.settings.model_path
        model = whole_model(directory)
        if model != directory:
            policy = None
        _LOG.info(
            "engine starts", model=str(model), version=policy.version if policy else None, address=self.settings.address
        )
        async with vllm_process(self.settings, model) as process:
            died = asyncio.create_task(process.wait())
            stopped = asyncio.create_task(self.stop.wait())
            work = asyncio.create_task(self._serve({slot: policy} if policy else {}))
            done, _ = await asyncio.wait({died, stopped, work}, return_when=asyncio.FIRST_COMPLETED)
            for task in (died, stopped, work):
                task.cancel()
            if work in done:
                work.result()
            if died in done and not self.stop.is_set():
                raise EngineUnavailableError(f"vLLM at {self.settings.address} ended with status {process.returncode}")

    async def _ends_before_stop(self, work: "asyncio.Task[Any]") -> bool:
        """Send heartbeats until the work has ended, and return True; cancel it at a signal, and return False."""
        stopped = asyncio.create_task(self.stop.wait())
        async with running_beside(self._heartbeat_while_loading()):
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        is_done = work.done()
        for task in (work, stopped):
            task.cancel()
        return is_done

    async def _serve(self, started_from: Mapping[int, PublishedPolicy]) -> None:
        """Bring the engine to `ready`, then send heartbeats. `started_from`: slot → version that vLLM started with."""
        await self._wait_until_healthy()
        self.is_up = True
        await self.client.probe(self.settings.slots)
        await self.client.init_weight_transfer(str(self.settings.policies_root), self.settings.adapter)
        for slot, policy in started_from.items():
            await self.client.set_version(label_with(None, slot, policy.version))
        self._set_loaded(started_from)
        # A version may have been published while vLLM started, so load it before `ready`. Check once more afterwards: a
        # sync of a version published in between did not find this engine.
        await self._load_newer_versions()
        if self.settings.is_attached and not self.loaded and (label := await self.client.version()) is not None:
            raise EngineUnavailableError(
                f"vLLM at {self.settings.address} has the weights {label} of another run; start it anew"
            )
        await self._set_ready(EngineState.STARTING)
        async with running_beside(self._heartbeat_while_loading()):
            await self._catch_up()
        async with running_beside(self.fetcher.keep_fetching()):
            while True:
                await self._heartbeat()
                await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _wait_until_healthy(self) -> None:
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while not await self.client.health():
            if asyncio.get_running_loop().time() > deadline:
                raise EngineUnavailableError(f"vLLM at {self.settings.address} was not up after {START_SECONDS:.0f} s")
            await self._heartbeat()
            await asyncio.sleep(0.5)

    async def _heartbeat(self) -> None:
        """Write one heartbeat; skip it while vLLM is unresponsive or the store is unavailable.

        Raises EngineUnavailableError if only a new start helps: after quarantine, if vLLM is unresponsive for too long
        or has weights of others, or if the row is `gone`.
        """
        if self.is_up and not await self.client.health():
            if time.monotonic() - self.answered_at > UNRESPONSIVE_SECONDS:
                raise EngineUnavailableError(
                    f"vLLM at {self.settings.address} has not answered for {UNRESPONSIVE_SECONDS:.0f} s: "
                    "it is started anew"
                )
            return
        self.answered_at = time.monotonic()
        # Read before the row, so that a label that a sync writes in between is no contradiction.
        label = await self.client.version() if self.settings.is_attached and self.is_up else ""
        try:
            if self.is_up and time.monotonic() - self.heartbeat_at > engines.SILENT_SECONDS:
                await self._catch_up_after_silence()
            row = await self.database.run(engines.heartbeat_engine, self.engine_id)
            self.heartbeat_at = time.monotonic()
            if row is None:
                return
            self._require_registered(row)
            if self.settings.is_attached and self.is_up:
                await self._require_own_weights(label, row)
            if row.state is EngineState.QUARANTINED and self.is_up:
                reason = (row.details.get("canary") or {}).get("reason")
                raise EngineUnavailableError(f"quarantined ({reason}): vLLM is started anew")
            if row.state is EngineState.SYNCING and (row.pause_seconds_left or -1) < 0:
                await self._recover_abandoned_pause()
        except StoreUnavailableError as error:
            _LOG.warning("no heartbeat", reason=str(error))

    def _require_registered(self, row: EngineRow) -> None:
        """Raise EngineUnavailableError if the row is `gone`: an engine gets calls only if it registers anew."""
        if row.state is EngineState.GONE:
            taken = f"another engine set has taken over {self.settings.address}; it registers anew"
            raise EngineUnavailableError(f"the engine is no longer registered for engine set {row.engine_set}: {taken}")

    async def _look_at_row(self) -> None:
        """Require before each step of a load that the engine is registered; go on while the store is unavailable."""
        with contextlib.suppress(StoreUnavailableError):
            row = await self.database.run(engines.get_engine, self.engine_id)
            if row is not None:
                self._require_registered(row)

    async def _require_own_weights(self, label: str | None, row: EngineRow) -> None:
        """Raise EngineUnavailableError if an attached vLLM has other weights than its row says.

        `label` was read before `row`. Look again if they differ: a sync may have changed both in between.
        """
        if label is None and row.version is not None:
            raise EngineUnavailableError(f"vLLM at {self.settings.address} was started anew without our weights")
        if row.state is not EngineState.READY or label == row.version:
            return
        label = await self.client.version()
        async with self.database.begin() as conn:
            again = await engines.get_engine(conn, self.engine_id) or row
        if again.state is EngineState.READY and label not in (row.version, again.version):
            found = f"vLLM at {self.settings.address} has the weights {label}, but its row says {again.version}"
            raise EngineUnavailableError(f"{found}: another engine set has updated it; it registers anew")

    async def _heartbeat_while_loading(self) -> None:
        """Write heartbeats beside a load, until cancelled: a large policy takes longer than an engine may be silent."""
        while True:
            with errors_logged("heartbeat not written"):
                if not self.is_up or await self.client.health():
                    await self.database.run(engines.heartbeat_engine, self.engine_id)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _catch_up_after_silence(self) -> None:
        """Load the newest version before the next heartbeat: syncs skip a silent engine."""
        row = await self.database.run(engines.get_engine, self.engine_id)
        if row is not None and row.state is EngineState.READY:
            self._adopt(row.version)
            await self._catch_up()
        elif self.holds_pause:  # the store became unavailable during the catch-up before
            await self._finish_catch_up()

    async def _catch_up(self) -> None:
        """If a newer version is published for a slot, pause the engine under a lease and load it."""
        if not self._newer(await self._newest_versions()):  # before the pause
            return
        async with self.database.begin() as conn:
            self.holds_pause = await engines.begin_engine_pause(conn, self.engine_id, RECOVERY_LEASE_SECONDS)
            row = await engines.get_engine(conn, self.engine_id)
        if self.holds_pause:
            self._adopt(row.version if row else None)  # a sync may have loaded another slot meanwhile
            await self._finish_catch_up()

    async def _finish_catch_up(self) -> None:
        await self._load_newer_versions(only_here=True)  # the lease must not wait for a storage
        await self._set_ready(EngineState.SYNCING)
        self.holds_pause = False

    async def _recover_abandoned_pause(self) -> None:
        """Take over a pause whose lease has lapsed. Its holder left unknown weights in some slot, so load the newest
        version of each before vLLM goes on."""
        async with self.database.begin() as conn:
            if not await engines.take_over_engine_pause(conn, self.engine_id, RECOVERY_LEASE_SECONDS):
                return
        _LOG.warning("the pause's lease has run out; loading the newest policy and resuming")
        async with running_beside(self._heartbeat_while_loading()):
            await self.client.pause()
            newest = await self._newest_versions(only_here=True)
            self.loaded.clear()
            self.canaries.clear()
            if newest:
                await self._load(newest)
            elif (label := await self.client.version()) is not None:
                raise EngineUnavailableError(
                    f"an abandoned update left unknown weights under {label!r} and no published policy can be read"
                )
            else:
                await self.client.resume()
        await self._set_ready(EngineState.SYNCING)

    async def _load_newer_versions(self, only_here: bool = False) -> None:
        """Load the newest versions, or the newest on this node, until no newer one was published meanwhile."""
        async with running_beside(self._heartbeat_while_loading()):
            while newer := self._newer(newest := await self._newest_versions(only_here)):
                # Another base would take the adapters of ended runs away, so they leave the label.
                self.loaded = {slot: version for slot, version in self.loaded.items() if slot in newest}
                await self._load(newer)

    async def _newest_versions(self, only_here: bool = False, only_first: bool = False) -> dict[int, PublishedPolicy]:
        """Return the newest usable version of every slot, or of the first, that has one."""
        found: dict[int, PublishedPolicy] = {}
        for slot in self.settings.slots:
            policy = await self.fetcher.newest_intact(self.loaded.get(slot), only_here, slot)
            if policy is not None:
                found[slot] = policy
                if only_first:
                    break
        return found

    def _newer(self, newest: Mapping[int, PublishedPolicy]) -> dict[int, PublishedPolicy]:
        """Return those that are not loaded."""
        return {slot: policy for slot, policy in newest.items() if policy.version != self.loaded.get(slot)}

    async def _load(self, policies: Mapping[int, PublishedPolicy]) -> None:
        """Load the versions of several slots in one update, so that vLLM never goes on between two of them."""
        root = self.settings.policies_root
        transfers = [load_from_files(policy, root, slot) for slot, policy in policies.items()]

        async def transfer_all(client: EngineClient) -> None:
            for transfer in transfers:
                await transfer(client)

        label = label_of_versions(self.loaded | {slot: policy.version for slot, policy in policies.items()})
        assert label is not None
        await replace_weights(self.client, label, transfer_all, close_open_update=True, before_phase=self._look_at_row)
        self._set_loaded(policies)
        _LOG.info("policy loaded", version=label)

    def _set_loaded(self, policies: Mapping[int, PublishedPolicy]) -> None:
        for slot, policy in policies.items():
            self.loaded[slot] = policy.version
            self.canaries.pop(slot, None)
            if policy.canary is not None:
                self.canaries[slot] = policy.canary

    def _adopt(self, label: str | None) -> None:
        """Take over from the engine's row which versions it serves; of those that others loaded, no canary is known."""
        served = versions_of_label(label)
        for slot in set(self.canaries):
            if served.get(slot) != self.loaded.get(slot):
                del self.canaries[slot]
        self.loaded = served

    async def _set_ready(self, expected: EngineState) -> None:
        """Move the engine from `expected` to `ready`. Raises EngineUnavailableError if its canary or the move fails."""
        for slot, canary in self.canaries.items():
            verdict = await score_canary(self.client, canary, slot=slot)
            if verdict.reason is not None:
                raise EngineUnavailableError(
                    f"the engine does not serve {self.loaded[slot]}: {verdict.reason}; it is started anew"
                )
        label = label_of_versions(self.loaded)
        async with self.database.begin() as conn:
            if not await engines.set_engine_state(conn, self.engine_id, expected, EngineState.READY):
                raise EngineUnavailableError(f"{self.settings.address} is no longer {expected}; it registers anew")
            await engines.set_engine_version(conn, self.engine_id, label)
        _LOG.info("engine ready", version=label, address=self.settings.address)
