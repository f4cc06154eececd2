"""Python's garbage collector, kept from stopping the calls in flight.

Why here: its look at everything takes 40 ms with a thousand open sessions (seen), and half a second with vLLM's parsers imported.
Called by: `app.py`.

What was imported is left out of every look for good. Of what changes, the youngest 700 objects are looked at as Python does by itself, then
3,500, which takes some milliseconds (25,000 took 20), everything only in a pause of the work. Sessions and turns hold no cycles, so what
waits for that look is little.
"""

import asyncio
import gc
import time
from collections.abc import Callable

_YOUNGEST, _YOUNG, _NEVER = 700, 5, 1_000_000_000
_DUE = 10
"""So many looks at the young, and one at everything is due: Python's own number."""
_QUIET_SECONDS = 10.0
_LATEST_SECONDS = 600.0


def freeze_startup_objects() -> None:
    """Everything that exists now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, _YOUNG, _NEVER)


async def collect_when_idle(is_busy: Callable[[], bool]) -> None:
    """Looks at everything when no call has been in flight for ten seconds, at the latest after ten minutes. Never ends."""
    worked_at = looked_at = time.monotonic()
    while True:
        await asyncio.sleep(1)
        now = time.monotonic()
        if is_busy():
            worked_at = now
        if gc.get_count()[2] >= _DUE and (now - worked_at > _QUIET_SECONDS or now - looked_at > _LATEST_SECONDS):
            gc.collect()
            looked_at = now
