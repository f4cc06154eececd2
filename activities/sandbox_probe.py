"""Find out by doing it whether the sandbox service gives what a run needs, before the run starts any agent.

What it lacks would otherwise show as agents without model calls, as boxes that nothing ends, or as agents that reach
the internet.
"""

import asyncio
import os
import shlex
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import urlsplit

import structlog

from ratchet.errors import (
    CommandFailedError,
    ConfigError,
    SandboxBusyError,
    SandboxGoneError,
    SandboxRefusesError,
    UnknownImageError,
)
from sandboxes.base import Network, Sandbox, SandboxProvider

_LOG = structlog.get_logger()
PATIENCE_SECONDS = 60.0
"""The longest time for which the adapter may be unreachable; it may be restarting."""
_TRY_SECONDS, _PAUSE_SECONDS, _BOX_SECONDS = 10, 3.0, 300
_TTL_SHARE = 0.9
"""Share of the time to live that a box must get: services round, and ask for it once more while an agent works."""
_METADATA = {"ratchet_probe": "adapter"}
"""No label of this installation: nothing of the ledger refers to these boxes, and their time to live is short."""
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


class SandboxProbe:
    """The probe of one worker. `url`: the adapter as a box reaches it. `outside`: addresses that no box may reach."""

    def __init__(self, provider: SandboxProvider, url: str, outside: Sequence[str] = OUTSIDE) -> None:
        self.provider = provider
        self.url = url
        self._outside = outside

    async def problem(
        self,
        image: str,
        ttl_seconds: int = _BOX_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        has_open_boxes: bool = False,
    ) -> str:
        """Return why rollouts in boxes of this image would fail, with the remedy; empty if they can run.

        `ttl_seconds`: the time to live of the run's boxes. It is also empty if nothing is known, because the service
        has no room or the image no program that could call. Boots report such things.
        """
        try:
            async with await self._box(image, network=True) as box:
                found = await self._promise_not_kept(box, ttl_seconds)
                found = found or await self._way_to_adapter(box, patience_seconds)
                found = found or await self._way_outside(box, ())
            if not found and has_open_boxes:
                async with await self._box(image, network="open"):
                    pass
            if not found and self.provider.capabilities.network_policy:
                async with await self._box(image, network=False) as box:
                    found = await self._way_outside(box, (f"{self.url}/v1/models",))
        except (SandboxBusyError, SandboxGoneError, CommandFailedError, ConfigError) as error:
            if isinstance(error, (SandboxRefusesError, ConfigError)) and not isinstance(error, UnknownImageError):
                return f"the sandbox service cannot be used: {error}; mend it, then resume the run"
            _LOG.warning("what the sandbox service gives is not known", reason=str(error))
            return ""
        return found

    async def _box(self, image: str, *, network: Network) -> Sandbox:
        key = uuid.uuid4().hex
        return await self.provider.create(
            image, ttl_seconds=_BOX_SECONDS, metadata=_METADATA, idempotency_key=key, network=network
        )

    async def _promise_not_kept(self, box: Sandbox, ttl_seconds: int) -> str:
        """Return what the service does otherwise than asked with a box and what it knows of it."""
        if not (await self.provider.describe(box.id)).carries(_METADATA):
            return (
                f"the sandbox service {self.provider.name} does not give back the metadata of a box, without which no "
                "box is ended before its time to live: use a service that keeps the `metadata` of E2B's API"
            )
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
