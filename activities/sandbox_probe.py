"""Find out by doing it whether the sandbox service gives what a run needs, before the run starts any agent.

What it lacks would otherwise show as agents without model calls, boxes that nothing ends, or agents on the internet.
"""

import asyncio
import contextlib
import itertools
import os
import shlex
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from urllib.parse import urlsplit

import structlog

from ratchet.errors import (
    CommandFailedError,
    ConfigError,
    RatchetError,
    SandboxBusyError,
    SandboxGoneError,
    SandboxRefusesError,
    UnknownImageError,
)
from ratchet.types import PRE_COMMANDS
from sandboxes.base import Network, OpenedFirst, Sandbox, SandboxProvider

_LOG = structlog.get_logger()
PATIENCE_SECONDS = 60.0
"""The longest time for which the adapter may be unreachable; it may be restarting."""
_TRY_SECONDS, _PAUSE_SECONDS, _BOX_SECONDS = 10, 3.0, 300
_NUM_COMMANDS, _FILE_BYTES, _OUTPUT_BYTES = 10, 5 << 20, 3 << 20
_TTL_SHARE = 0.9
"""Share of the time to live that a box must get: services round, and ask for it once more while an agent works."""
_METADATA = {"ratchet_probe": "adapter"}
"""No label of this installation: nothing of the ledger refers to these boxes, and their time to live is short."""
_Try = Callable[[Sandbox], Awaitable[str]]
"""Tries one thing in a box and returns what is missing; empty if nothing is."""
_ERRORS = (SandboxBusyError, SandboxGoneError, CommandFailedError, ConfigError)
OUTSIDE = ("http://1.1.1.1/", "http://169.254.169.254/")
"""One address of the internet, and the one at which clouds tell secrets of a machine."""
_PYTHON = """
import sys, urllib.error, urllib.request
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=%d)
    print("reached")
except urllib.error.HTTPError:
    print("reached")
except Exception as error:
    print("unreachable", getattr(error, "reason", error))
"""
_SCRIPT = """
for python in python3 /opt/ratchet/bin/python3; do
  command -v "$python" >/dev/null 2>&1 && exec "$python" -c {code} {url}
done
if command -v curl >/dev/null 2>&1; then
  problem=$(curl --noproxy '*' -sS -m {seconds} -o /dev/null {url} 2>&1) && echo reached || echo "unreachable $problem"
fi
"""
"""Any HTTP answer counts, also a refusal. It prints nothing if the image has neither Python nor curl."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability of a service as it was tried. `problem`: what is missing, and the remedy if the product knows one;
    empty if nothing is. `error`: with which the service refused to be tried."""

    capability: str
    problem: str
    measured: str
    error: RatchetError | None = None


class SandboxProbe:
    """Tries a service. `url`: the adapter as a box reaches it, which is not tried if it is empty. `outside`: addresses
    that no box may reach."""

    def __init__(self, provider: SandboxProvider, url: str, outside: Sequence[str] = OUTSIDE) -> None:
        self.provider = provider
        self.url = url
        self._outside = outside

    async def problem(
        self,
        image: str,
        ttl_seconds: int = _BOX_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        opened: Collection[str] = (),
    ) -> str:
        """Return why rollouts in boxes of this image would fail, with the remedy; empty if they can run.

        `ttl_seconds`: the time to live of the run's boxes; `opened`: as `sandbox.network`. It is also empty if nothing
        is known, because the service has no room or the image no program that could call. Boots report such things.
        """
        async with contextlib.aclosing(self.findings(image, ttl_seconds, patience_seconds, opened)) as findings:
            async for found in findings:
                error = found.error
                if error is None and found.problem:
                    return found.problem
                if isinstance(error, (SandboxRefusesError, ConfigError)) and not isinstance(error, UnknownImageError):
                    return f"the sandbox service cannot be used: {error}; mend it, then resume the run"
                if error is not None:
                    _LOG.warning("what the sandbox service gives is not known", reason=str(error))
                    return ""
        return ""

    async def findings(
        self,
        image: str,
        ttl_seconds: int = _BOX_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        opened: Collection[str] = (),
        more: bool = False,
    ) -> AsyncGenerator[Finding, None]:
        """Yield what a run needs, in the order in which it is tried. `more`: also what every service has that keeps the
        contract of `sandboxes/base.py`, with its speed."""
        tries: list[tuple[str, Network, _Try]] = [
            ("metadata", True, self._keeps_metadata),
            ("time to live", True, partial(self._lives, ttl_seconds)),
            ("two users", True, _has_two_users),
            ("network of an agent's box", True, partial(self._wrong_way, True, patience_seconds)),
        ]
        if more:
            tries += [(name, True, one) for name, one in _CONTRACT.items()]
            tries.append(("listing", True, self._is_listed))
            tries.append(("one box for one key, and its end", True, partial(self._keeps_keys, image)))
        if PRE_COMMANDS in opened:
            for is_agents in (True, False):
                closes = partial(self._closes, is_agents, patience_seconds)
                tries.append(("closing of the network", OpenedFirst(is_agents), closes))
        elif opened:
            tries.append(("open network", "open", _nothing))
        if self.provider.capabilities.network_policy:
            tries.append(("network of a grading box", False, partial(self._wrong_way, False, patience_seconds)))
        for network, group in itertools.groupby(tries, key=lambda one: one[1]):
            try:
                started = time.monotonic()
                box = await self._box(image, network=network)
                yield Finding("create", "", f"{time.monotonic() - started:.2f} s")
                async with box:
                    for name, _, try_it in group:
                        yield await _found(name, try_it, box)
            except _ERRORS as error:
                yield Finding("create", str(error), "", error)

    async def _box(self, image: str, *, network: Network, key: str = "") -> Sandbox:
        key = key or uuid.uuid4().hex
        return await self.provider.create(
            image, ttl_seconds=_BOX_SECONDS, metadata=_METADATA, idempotency_key=key, network=network
        )

    async def _keeps_metadata(self, box: Sandbox) -> str:
        if (await self.provider.describe(box.id)).carries(_METADATA):
            return ""
        return (
            f"the sandbox service {self.provider.name} does not give back the metadata of a box, without which no "
            "box is ended before its time to live: use a service that keeps the `metadata` of E2B's API"
        )

    async def _lives(self, ttl_seconds: int, box: Sandbox) -> str:
        asked_at = datetime.now(UTC)
        try:
            await box.set_ttl(ttl_seconds)
        except SandboxRefusesError as error:
            found = str(error)
        else:
            ends_at = (await self.provider.describe(box.id)).ends_at
            await box.set_ttl(_BOX_SECONDS)  # no ledger knows the box if this worker dies
            given = ttl_seconds if ends_at is None else (ends_at - asked_at).total_seconds()
            if given >= _TTL_SHARE * ttl_seconds:
                return ""
            found = f"it ends after {given:.0f} s"
        return (
            f"a box of the sandbox service {self.provider.name} cannot live {ttl_seconds} s ({found}): set "
            "RATCHET_SANDBOX_MAX_TTL_SECONDS to what the service allows, run `ratchet up`, then resume the run"
        )

    async def _closes(self, is_agents: bool, patience_seconds: float, box: Sandbox) -> str:
        await box.set_network(is_agents)
        found = await self._wrong_way(is_agents, patience_seconds, box)
        return f"after the network of `pre_commands` was closed: {found}" if found else ""

    async def _is_listed(self, box: Sandbox) -> str:
        listed = {info.id for info in await self.provider.list(_METADATA)}
        if box.id not in listed:
            return "a living box is not listed: boxes that a killed worker leaves behind stay until their time to live"
        return ""

    async def _keeps_keys(self, image: str, box: Sandbox) -> str:
        key = uuid.uuid4().hex
        made = {one.id: one for one in [await self._box(image, network=True, key=key) for _ in range(2)]}
        ended = [await self.provider.kill(box_id) for box_id in made for _ in range(2)]
        if len(made) > 1:
            return "two calls with one key make two boxes: one that a killed worker makes stays until its time to live"
        if ended != [True, False]:
            return f"two calls that end a box answer {ended}: the ledger does not know which of two workers ended it"
        return ""

    async def _wrong_way(self, is_agents: bool, patience_seconds: float, box: Sandbox) -> str:
        """Return what the box reaches or does not reach, otherwise than an agent's or a grading box must."""
        found = await self._way_to_adapter(box, patience_seconds) if is_agents and self.url else ""
        return found or await self._way_outside(box, () if is_agents or not self.url else (f"{self.url}/v1/models",))

    async def _way_to_adapter(self, box: Sandbox, patience_seconds: float) -> str:
        """Return why the box cannot call the adapter; empty after a call that was answered."""
        until = time.monotonic() + patience_seconds
        while True:
            words = await self._call(box, f"{self.url}/v1/models")
            if not words.startswith("unreachable"):
                return ""
            if time.monotonic() > until:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        found = " ".join(words.removeprefix("unreachable").split())[:200] or "no answer"
        bound = os.environ.get("ADAPTER_BIND_HOST") or "an address that is not known here"
        return (
            f"a box cannot reach the adapter at {self.url} ({found}), which listens on {bound}: set "
            "ADAPTER_PUBLIC_HOST to an address of the adapter's machine that boxes reach, let its port through the "
            "firewall, run `ratchet up`, then resume the run"
        )

    async def _way_outside(self, box: Sandbox, further: tuple[str, ...]) -> str:
        """Return which of the addresses that the box must not reach it has reached."""
        if not self.provider.capabilities.network_policy:
            return ""
        service = str(getattr(self.provider, "url", ""))
        if service.startswith("http://") and urlsplit(service).hostname != urlsplit(self.url).hostname:
            further = (*further, service)
        urls = (*self._outside, *further)
        answers = await asyncio.gather(*(self._call(box, url) for url in urls))
        reached = [url for url, words in zip(urls, answers, strict=True) if words == "reached"]
        if not reached:
            return ""
        return (
            f"a box of the sandbox service {self.provider.name} reaches {', '.join(reached)} although it was asked for "
            "with a network that does not lead there, so an agent could download a solution: close the network of the "
            "service's boxes, or set RATCHET_SANDBOX_OPEN_NETWORK=1 to accept this, run `ratchet up`, then resume the "
            "run"
        )

    async def _call(self, box: Sandbox, url: str) -> str:
        """Return `reached`, `unreachable` with the reason, or nothing if the image has no program that could call."""
        script = _SCRIPT.format(code=shlex.quote(_PYTHON % _TRY_SECONDS), url=shlex.quote(url), seconds=_TRY_SECONDS)
        return (await box.exec(script, check=False)).stdout.strip()


async def _found(capability: str, try_it: _Try, box: Sandbox) -> Finding:
    started = time.monotonic()
    try:
        problem, error = await try_it(box), None
    except _ERRORS as refused:
        problem, error = str(refused), refused
    return Finding(capability, problem, f"{time.monotonic() - started:.2f} s", error)


async def _nothing(_box: Sandbox) -> str:
    return ""


async def _has_two_users(box: Sandbox) -> str:
    """Try the user that agents and tests have by default, if the image has it; else it is made in the box."""
    ids = [(await box.exec("id -u", user=user, check=False)).stdout.strip() for user in ("root", "agent")]
    if ids[0] != ids[1] or not ids[0]:
        return ""
    return (
        "a box has one user, so that an agent could end or change what watches and grades it, and none is started: on "
        "this machine `ratchet doctor` names what gives the gateway's user more ids; then run `ratchet up` and resume "
        "the run"
    )


async def _runs_commands(box: Sandbox) -> str:
    for number in range(_NUM_COMMANDS):
        ran = await box.exec(f"echo out; echo err >&2; exit {number}", check=False)
        if (ran.exit_code, ran.stdout, ran.stderr) != (number, "out\n", "err\n"):
            return f"a command's exit code and outputs are {ran}: nothing that a stage does in a box can be believed"
    return ""


async def _keeps_files(box: Sandbox) -> str:
    data = os.urandom(_FILE_BYTES)
    await box.write_file("/tmp/ratchet-probe/file", data)
    if await box.read_file("/tmp/ratchet-probe/file") != data:
        return "a file comes back changed: patches and tests cannot be believed"
    try:
        await box.read_file("/tmp/ratchet-probe/missing")
    except FileNotFoundError:
        return ""
    return "a missing file is not one: stages that look for what an agent wrote fail"


async def _prints_much(box: Sandbox) -> str:
    printed = (await box.exec(f"head -c {_OUTPUT_BYTES} /dev/zero | tr '\\0' x")).stdout
    if printed == "x" * _OUTPUT_BYTES:
        return ""
    return f"{len(printed)} of {_OUTPUT_BYTES} characters of output arrive: a long log of tests is judged in part"


async def _limits_time(box: Sandbox) -> str:
    try:
        await box.exec(f"echo begun; sleep {_TRY_SECONDS}", timeout=1)
    except CommandFailedError as error:
        if error.timed_out and error.stdout == "begun\n":
            return ""
    return "a command is not ended at its time limit with its output so far: a stage waits, or loses the log"


_CONTRACT: dict[str, _Try] = {
    f"{_NUM_COMMANDS} commands": _runs_commands,
    f"a file of {_FILE_BYTES >> 20} MiB both ways": _keeps_files,
    f"{_OUTPUT_BYTES >> 20} MiB of output": _prints_much,
    "time limit of a command": _limits_time,
}
