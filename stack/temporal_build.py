"""Build `stack/temporal`, the program with Temporal's server and UI, once per machine and digest of its sources.

go.mod and go.sum pin every version. Go's own caches make a second build a matter of seconds; `go clean -cache
-modcache` frees them.
"""

import hashlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from ratchet import paths
from ratchet.durations import duration_in_words
from ratchet.errors import MachineError
from stack.make_once import making
from stack.progress import CountedLine, ReportProgress

SOURCES = Path(__file__).parent / "temporal"
_GO_PLACES = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go")
_REPORT_SECONDS = 15.0


def find_go() -> str | None:
    """Return Go's program: the one on PATH, else one at a usual place, None without either."""
    return shutil.which("go") or next((path for path in _GO_PLACES if Path(path).is_file()), None)


def server_program() -> Path:
    """Return where the program for these sources is, or will be."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return paths.cache() / "bin" / f"temporal-server-{digest.hexdigest()[:12]}"


def ensure_server_program(say: ReportProgress) -> Path:
    """Return the program; build it if it is missing. Concurrent calls build it once. Raises MachineError."""
    program = server_program()
    if program.is_file():
        return program
    go = find_go()
    if go is None:
        raise MachineError("Temporal's server cannot be built, because Go is not installed")
    with making(program, say) as scratch:
        if not program.is_file():
            built = scratch / "temporal-server"
            started = time.monotonic()
            say("building Temporal's server and UI with Go, once; this takes some minutes")
            _build(go, built, say)
            built.rename(program)
            say(f"built in {duration_in_words(time.monotonic() - started)}: {program}")
    return program


def _build(go: str, target: Path, say: ReportProgress) -> None:
    environment = {**os.environ, "GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0"}
    say("downloading the sources that go.sum names")
    _run([go, "mod", "download"], environment)
    num_packages = len(_run([go, "list", "-deps", "."], environment).splitlines())
    # `-v` prints one line per package that is compiled; packages in Go's cache are not printed.
    command = [go, "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(target), "."]
    with subprocess.Popen(command, cwd=SOURCES, env=environment, stderr=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        reported_at = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - reported_at >= _REPORT_SECONDS:
                reported_at = time.monotonic()
                text = f"compiled {len(lines)} of at most {num_packages} packages"
                say(CountedLine(text, "packages", len(lines), num_packages))
        reader.join()
    if process.returncode != 0:
        raise MachineError(f"Temporal's server cannot be built: {''.join(lines[-5:]).strip()[-400:]}")


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=SOURCES, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError(f"Temporal's server cannot be built: {done.stderr.strip()[-400:]}")
    return done.stdout
