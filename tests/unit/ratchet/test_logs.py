"""Log lines of a process in both formats, from our own code, the standard library and a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack.part_logs import first_error, readable

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, warnings
import structlog
from cli.main import logging_part
from ratchet.errors import MachineError

def gateway():
    structlog.contextvars.bind_contextvars(run_id="run-7", rollout_id=12)
    log = structlog.get_logger()
    log.debug("never")
    log.info("engine ready", address="http://127.0.0.1:1", reason="Authorization: Bearer abc.def")
    logging.getLogger("uvicorn.error").warning("closed %s", "postgresql://me:pass1234@host/x")
    logging.getLogger("temporalio.activity").warning("slow", extra={"temporal_activity": {"activity_id": "3"}})
    logging.getLogger("uvicorn.error").info("never")
    key = "sk-planted-1234567"
    try:
        raise ValueError("key " + key)
    except ValueError:
        log.exception("call failed")
    FAIL

logging_part(gateway)()
"""


def run(fail: str, log_format: str) -> tuple[int, str]:
    environment = {**os.environ, "RATCHET_LOG_FORMAT": log_format, "SERVICE_API_KEY": "sk-planted-1234567"}
    command = [sys.executable, "-c", SCRIPT.replace("FAIL", fail)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_json_has_one_object_a_line_with_the_ids(tmp_path: Path) -> None:
    code, output = run("raise MachineError('no disk')", "json")
    lines = [json.loads(line) for line in output.splitlines()]
    assert [one["event"] for one in lines] == [
        "engine ready",
        "closed postgresql://me@host/x",
        "slow",
        "call failed",
        "ratchet: no disk",
    ]
    common = {"run_id": "run-7", "rollout_id": 12, "part": "gateway"}
    assert all(one.items() >= common.items() and one["timestamp"].endswith("Z") for one in lines)
    assert lines[2]["temporal_activity"] == {"activity_id": "3"} and lines[1]["logger"] == "uvicorn.error"
    assert lines[3]["exception"].endswith("ValueError: key ***") and lines[0]["reason"] == "Authorization: Bearer ***"
    assert "planted" not in output and "pass1234" not in output and code == 2

    log = tmp_path / "gateway.log"
    log.write_text(output)
    assert first_error(log) == "ratchet: no disk"
    log.write_text("\n".join(output.splitlines()[:-1]) + "\n")
    assert first_error(log) == "ValueError: key ***"


def test_a_bug_is_a_line_too() -> None:
    code, output = run("raise KeyError('x')", "json")
    last = json.loads(output.splitlines()[-1])
    assert (last["level"], last["event"], code) == ("error", "the part has failed", 1)
    assert last["exception"].endswith("KeyError: 'x'")


def test_text_is_the_default_and_has_the_same_facts() -> None:
    _, output = run("pass", "")
    assert "[info     ] engine ready" in output and "rollout_id=12" in output and "run_id=run-7" in output
    assert "[warning  ] closed postgresql://me@host/x" in output and "never" not in output
    assert "ValueError: key ***" in output and "planted" not in output and "abc.def" not in output
    assert "Traceback" in output and not output.startswith("{")


@pytest.mark.parametrize("log_format", ["", "json"])
def test_lines_can_be_read_in_both_formats(log_format: str) -> None:
    _, output = run("pass", log_format)
    text = "\n".join(readable(line) for line in output.splitlines())
    assert "[info     ] engine ready" in text and "rollout_id=12" in text
    assert "ValueError: key ***" in text and not text.startswith("{")


def test_other_lines_stay_as_they_are() -> None:
    for line in ("LOG:  database system is ready", '{"level": "info", "msg": "of another program"}', "{broken", ""):
        assert readable(line) == line
