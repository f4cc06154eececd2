"""The real vLLM on a CPU, in the size that tests and benchmarks start: float32, one thread, a small cache."""

import asyncio
from pathlib import Path
from typing import Any

from engine.client import EngineClient
from engine.process import EngineSettings
from stack.ports import free_port


def cpu_settings(model: Path, home: Path, **values: Any) -> EngineSettings:
    """Return the settings of an engine on a free port; `values` replace or add some. `home`: its state."""
    defaults = {
        "model_path": model,
        "port": free_port(),
        "database_url": "",
        "state_dir": home,
        "policies_root": home,
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_gib": 1,
        "num_threads": 1,
        "args": ("--enforce-eager",),
    }
    return EngineSettings.model_validate(defaults | values)


async def wait_until_healthy(client: EngineClient, process: asyncio.subprocess.Process) -> None:
    """Wait until vLLM answers; fail if it ends before."""
    while not await client.health():
        assert process.returncode is None, f"vLLM has ended with status {process.returncode}"
        await asyncio.sleep(0.5)
