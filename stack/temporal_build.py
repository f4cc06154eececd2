"""Build `stack/temporal`, the program with Temporal's server and UI, once per machine and digest of its sources.

go.mod and go.sum pin every version. Go's own caches make a second build a matter of seconds; `go clean -cache
-modcache` frees them. Nothing but the standard library is imported, so that the build can begin while the Python
environment is made.
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
from ratchet.make_once import making
from ratchet.progress import CountedLine, ReportProgress

SOURCES = Path(__file__).parent / "temporal"
_GO_PLACES = ("/usr/local/go/bin/go", "/usr/lib/go/bin/go")
_REPORT_SECONDS = 15.0
# Without debugging information and with a larger heap the compiler takes a fifth less CPU.
_FLAGS = ("-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags=-s -w")
_ENVIRONMENT = {"GOFLAGS": "-mod=readonly", "GOWORK": "off", "CGO_ENABLED": "0", "GOGC": "400"}


def find_go() -> str | None:
    """Return Go's program: the one on PATH, else one at a usual place, None without either."""
    return shutil.which("go") or next((path for path in _GO_PLACES if Path(path).is_file()), None)


def server_program() -> Path:
    """Return where the program for these sources is, or will be."""
    digest = hashlib.sha256()
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(bytes(source.relative_to(SOURCES)) + b"\0" + source.read_bytes() + b"\0")
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
    environment = {**os.environ, **_ENVIRONMENT, "GOTMPDIR": str(target.parent)}  # Go leaves files if it is ended
    say("downloading the sources that go.sum names")
    missing = _run([go, "list", "-deps", *_FLAGS, "-f", "{{if .Stale}}{{.ImportPath}}{{end}}", "."], environment)
    total = len(missing.split())
    # `-v` prints one line per package that is compiled.
    command = [go, "build", "-v", *_FLAGS, "-o", str(target), "."]
    with subprocess.Popen(command, cwd=SOURCES, env=environment, stderr=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            _report(process, lines, total, say)
        finally:
            process.terminate()  # if this process is interrupted; the compilers end with their packages
        reader.join()
    if process.returncode != 0:
        raise MachineError(f"Temporal's server cannot be built: {''.join(lines[-5:]).strip()[-400:]}")


def _report(process: "subprocess.Popen[str]", lines: list[str], total: int, say: ReportProgress) -> None:
    """Report the packages compiled, and the time for the rest at the rate so far, until the process ends."""
    started = reported_at = time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        done = min(len(lines), total)
        if now - reported_at >= _REPORT_SECONDS and done:
            reported_at = now
            minutes = round((total / done - 1) * (now - started) / 60)
            rest = f"about {minutes} more min" if minutes else "less than a minute more"
            say(CountedLine(f"compiled {done:,} of {total:,} packages, {rest}", "packages", done, total))


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=SOURCES, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError(f"Temporal's server cannot be built: {done.stderr.strip()[-400:]}")
    return done.stdout
