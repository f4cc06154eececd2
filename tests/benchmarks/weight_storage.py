"""Bytes and seconds of a version's way to another node: by a path that both share, and by an S3 server.

`ratchet admin bench weight_storage`. The server is moto, in memory and on the same machine, so the figures are the cost
of the way itself, without a network. Both ways take turns. Shared path: the files are written and fsynced, then read
once for their digests. S3: the same files are uploaded after that, fetched to another directory and digested there.
None of this is part of an engine's pause, except that vLLM digests the files once more before it loads them. Prints
JSON.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from engine import policy_files, weight_storage
from engine.policy_cache import PolicyCache
from tests.benchmarks._commit import commit
from tests.s3_storage import s3_storage

ROUNDS = 5
NUM_BYTES = {"tiny policy": 3_600_000, "100 MB": 100_000_000}


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(home: Path, address: str, name: str, num_bytes: int) -> dict[str, Any]:
    import torch

    base = home / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    state = {"weight": torch.randn(num_bytes // 4)}
    rounds = [one_round(home, state, address, f"{name.replace(' ', '-')}/{number}.e1") for number in range(ROUNDS)]
    return {
        "bytes": 4 * len(state["weight"]),
        "seconds": {phase: round(median(one[phase] for one in rounds), 3) for phase in rounds[0]},
    }


def one_round(home: Path, state: Any, address: str, version: str) -> dict[str, float]:
    directory, uri = home / "learner" / version, weight_storage.version_address(address, version)
    with PolicyCache(home / "node") as cache:
        write = seconds_of(lambda: policy_files.publish_policy(state, home / "base", directory))
        files = policy_files.describe_files(directory)
        return {
            "write": write,
            "shared path: read": seconds_of(lambda: policy_files.is_intact(directory, files)),
            "S3: upload": seconds_of(lambda: weight_storage.upload_version(directory, uri, files)),
            "S3: fetch": seconds_of(lambda: cache.fetch(uri, files)),
        }


def main() -> None:
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as directory, s3_storage() as s3:
        address = s3.make_bucket("weights")
        found = {name: measure(Path(directory), address, name, size) for name, size in NUM_BYTES.items()}
    load = {"load_at_start": before, "load_at_end": os.getloadavg()[0]}
    print(json.dumps({"commit": commit(), "rounds": ROUNDS, **load, **found}, indent=2))


if __name__ == "__main__":
    main()
