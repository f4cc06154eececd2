"""A chat as a rollout by hand: its generate function holds the session open, and a person makes the model calls.

The stages of every rollout then give it a box, a guard and an end. No sample is returned, so no run trains a token.
"""

import asyncio
from typing import Any


async def hold_session(args: Any, sample: Any, sampling_params: dict[str, Any]) -> None:
    """Wait until the rollout is cancelled or its guard is spent. Without a patch there is no verdict and no reward."""
    await asyncio.Event().wait()
