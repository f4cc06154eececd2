"""A log of JSON objects has one per line of a run's driver and ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, sys
from ratchet.logs import configure_logs
from training.service import relay_lines

async def relay():
    stream = asyncio.StreamReader(limit=100)
    stream.feed_data(sys.stdin.buffer.read())
    stream.feed_eof()
    await relay_lines(stream, "r")

configure_logs("learner")
asyncio.run(relay())
"""
LINES = """\
{"event": "of the driver itself"}
\x1b[36m(RayTrainWorker pid=12)\x1b[0m {"event": "learner ready", "run_id": "r"}
(RayTrainWorker pid=13, ip=10.0.0.2) UserWarning: slow {path}

{"no": object
"""


def test_lines_of_ranks_lose_the_name_of_their_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=f"{300 * 'x'}\n{LINES}",
        env={**os.environ, "RATCHET_LOG_FORMAT": "json"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["event"], one.get("process")) for one in found] == [
        ("of the driver itself", None),
        ("learner ready", None),
        ("UserWarning: slow {path}", "RayTrainWorker pid=13, ip=10.0.0.2"),
        ('{"no": object', "driver"),
    ]
    assert all(one["run_id"] == "r" for one in found[1:])
