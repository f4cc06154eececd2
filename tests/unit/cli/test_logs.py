"""`ratchet admin logs` prints lines of both formats as text."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
JSON = '{"event":"engine lost","level":"info","timestamp":"2026-11-25T22:11:00Z","part":"adapter","rollout_id":12}'


def logs(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "cli.main", "admin", "logs", *arguments]
    environment = {**os.environ, "RATCHET_HOME": str(home)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_both_formats_are_printed_as_text(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "adapter.log").write_text(f"first\nLOG:  a line of text\n{JSON}\n")
    done = logs(tmp_path, "adapter", "--lines", "2")
    text, readable = done.stdout.splitlines()
    assert text == "LOG:  a line of text" and done.returncode == 0
    assert readable.startswith("2026-11-25T22:11:00Z [info     ] engine lost") and "rollout_id=12" in readable
    assert logs(tmp_path, "nothing").returncode == 2
