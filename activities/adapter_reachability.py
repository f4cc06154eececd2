"""Find out whether a box reaches the adapter at the address that boxes are given, before a run starts any agent.

A wrong address would otherwise show as agents that never make a model call.
"""

import asyncio
import os
import shlex
import time
import uuid

import structlog

from ratchet.errors import CommandFailedError, ConfigError, SandboxBusyError, SandboxGoneError
from sandboxes.base import Sandbox, SandboxProvider

_LOG = structlog.get_logger()
PATIENCE_SECONDS = 60.0
"""The longest time for which the adapter may be unreachable; it may be restarting."""
_TRY_SECONDS, _PAUSE_SECONDS, _BOX_SECONDS = 10, 3.0, 300
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


class AdapterReachability:
    """The probe of one worker. `url`: the adapter as a box reaches it."""

    def __init__(self, provider: SandboxProvider, url: str) -> None:
        self.provider = provider
        self.url = url

    async def problem(self, image: str, patience_seconds: float = PATIENCE_SECONDS) -> str:
        """Return why a box of this image cannot call the adapter, with the remedy; empty if it can or nothing is known.

        Nothing is known if the service has no room or the image no program that could call. Boots report such things.
        """
        try:
            # No label of this installation: nothing of the ledger refers to it, and its time to live is short.
            box = await self.provider.create(
                image,
                ttl_seconds=_BOX_SECONDS,
                metadata={"ratchet_probe": "adapter"},
                idempotency_key=uuid.uuid4().hex,
            )
            async with box:
                found = await self._call(box, patience_seconds)
        except (SandboxBusyError, SandboxGoneError, CommandFailedError, ConfigError) as error:
            _LOG.warning("whether boxes reach the adapter is not known", reason=str(error))
            return ""
        if not found:
            return ""
        bound = os.environ.get("ADAPTER_BIND_HOST") or "an address that is not known here"
        return (
            f"a box cannot reach the adapter at {self.url} ({found}), which listens on {bound}: set "
            "ADAPTER_PUBLIC_HOST to an address of the adapter's machine that boxes reach, let its port through the "
            "firewall, run `ratchet up`, then resume the run"
        )

    async def _call(self, box: Sandbox, patience_seconds: float) -> str:
        """Return what the newest failed call says; empty after one that was answered."""
        url = shlex.quote(f"{self.url}/v1/models")
        script = _SCRIPT.format(code=shlex.quote(_PYTHON % _TRY_SECONDS), url=url, seconds=_TRY_SECONDS)
        until = time.monotonic() + patience_seconds
        while True:
            words = (await box.exec(script, check=False)).stdout.strip()
            if not words.startswith("unreachable"):
                return ""
            if time.monotonic() > until:
                return " ".join(words.removeprefix("unreachable").split())[:200] or "no answer"
            await asyncio.sleep(_PAUSE_SECONDS)
