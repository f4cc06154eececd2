"""Run a test command in a grading box and return a report that the code under test cannot forge.

The command runs unprivileged, unless a run allows root, with limits of time and output, and its processes are dead when
the report is read. Root's shell in the box writes the report, framed by a nonce that only root can read and that is new
for every run. Under pytest, the plugin `ratchet_witness` reports each test over a pipe; a runner that dies early leaves
a session without an end.
"""

import re
import secrets
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import NamedTuple

import orjson

from grading.flags import Flag
from ratchet import tracing
from ratchet.errors import CommandFailedError, GraderFailedError
from ratchet.types import JsonObject
from sandboxes.base import Sandbox

RUNNER_STATE = "/run/ratchet"
WITNESS_DIRECTORY = "/run/ratchet-witness"
SELECTED_FILE = f"{RUNNER_STATE}/selected"
"""Digests of the names of the tests to run, one a line; without this file all tests run. The tests can only read it."""


class UnusableBoxError(GraderFailedError):
    """The box itself could not run tests: it lacks what it needs, or the machine starved it of CPU."""


def _resource(name: str) -> str:
    return (files("grading") / "box" / name).read_text()


# Read once: a worker goes on with its own when an upgrade replaces the files of its checkout.
_PROGRAMS = {"ratchet_witness.py": _resource("witness.py"), "sitecustomize.py": _resource("sitecustomize.py")}
_RUN_TESTS = _resource("run_tests.sh")
_NUM_TOKENS = 500
_TOKEN_BYTES = 16
_HEAD_BYTES = 6_000_000
_TAIL_BYTES = 2_000_000
_FRAME_BYTES = 24_000_000
"""Limit of the witness's reports, those of 100,000 tests with long names. What exceeds it is lost, and with it the
session's end, so that nothing is solved."""
_OVERHEAD_SECONDS = 60.0
_MAX_DYNAMIC_FLAGS = 50
_STARVED_SHARE = 0.5
"""Share of the time limit. A run that timed out was starved of CPU if one of its processes waited longer than this for
a core, and all of them together got less than this. What the patch's own processes used is time that the run got, so a
patch cannot pass for starved by starting more of them."""
_PYTHONPATH = re.compile(r"\bPYTHONPATH=([\"']?)")
_GOFLAGS = re.compile(r"(?<![\"'])\bGOFLAGS=([\"']?)")


@dataclass(slots=True, frozen=True)
class LoadedModule:
    """A test file's module. `file`: its source file. `codes`: digests of the test files' code that its tests run.
    `changed`: some of it ran no more after the last test."""

    file: str
    codes: frozenset[str]
    changed: bool = False


@dataclass(slots=True)
class RunnerSession:
    """One run of pytest as its witness saw it. `tests`: node id → worst reported outcome. `exit` None: it did not
    end. `nested`: a test started it. `worker`: it is a process of xdist. `num_missed`: collected tests without any
    report. `modules`: by the test file's path; below `root` it is relative."""

    token: str
    number: int
    nested: bool = False
    worker: bool = False
    num_missed: int = 0
    modules: dict[str, LoadedModule] = field(default_factory=dict)
    exit: int | None = None
    canary: str = "none"
    tests: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    root: str = ""


@dataclass(slots=True, frozen=True)
class RunnerReport:
    """Result of a test command. `exit_code` None: it timed out. `starved`: it waited for a core most of its time.

    `lost`: root's shell itself ended without a report. `flags`: what the audit hook reported. `cpu_seconds`: those that
    all processes of the tests used.
    """

    exit_code: int | None
    log: str
    sessions: list[RunnerSession]
    starved: bool = False
    lost: bool = False
    flags: tuple[Flag, ...] = ()
    cpu_seconds: float = 0.0

    @property
    def top_sessions(self) -> list[RunnerSession]:
        """The sessions that were not started by tests."""
        return [session for session in self.sessions if not session.nested and not session.worker]

    @property
    def workers(self) -> list[RunnerSession]:
        """The processes of xdist."""
        return [session for session in self.sessions if session.worker]


def _script(nonce: str, tokens: list[str], command: str, workdir: str, seconds: float, witness: bool, user: str) -> str:
    values = {
        "NONCE": nonce,
        "TESTS_USER": user,
        "TOKENS": " ".join(tokens),
        "SECONDS_ALLOWED": f"{seconds:.3f}",
        "COMMAND_FILE": f"{RUNNER_STATE}/command",
        "WORKDIR": workdir,
        "HEAD_BYTES": str(_HEAD_BYTES),
        "TAIL_BYTES": str(_TAIL_BYTES),
        "FRAME_BYTES": str(_FRAME_BYTES),
        "WITNESS": "1" if witness else "",
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    for name, text in {"command": command, **_PROGRAMS}.items():
        end = f"END_{secrets.token_hex(8)}"
        lines.append(f"cat > {RUNNER_STATE}/{name} <<'{end}'\n{text}\n{end}")
    return "\n".join([*lines, _RUN_TESTS])


async def run_tests(
    box: Sandbox, command: str, workdir: str, seconds: float, witness: bool = True, user: str = "agent"
) -> RunnerReport:
    """Run `command` as a user of the box; its processes are dead when this returns.

    `witness`: load the pytest plugin. Raises UnusableBoxError if the box cannot run tests, and the box's own errors.
    """
    with tracing.span("tests", {"limit_seconds": seconds}):
        report = await _run_tests(box, command, workdir, seconds, witness, user)
        tests = [outcome for session in report.top_sessions for outcome in session.tests.values()]
        tracing.add_facts(
            {
                "exit_code": report.exit_code,
                "timed_out": report.exit_code is None,
                "starved": report.starved,
                "num_tests": len(tests),
                "num_passed": tests.count("passed"),
                "num_failed": tests.count("failed"),
            }
        )
        return report


async def _run_tests(
    box: Sandbox, command: str, workdir: str, seconds: float, witness: bool, user: str
) -> RunnerReport:
    nonce = secrets.token_hex(_TOKEN_BYTES)
    tokens = [secrets.token_hex(_TOKEN_BYTES) for _ in range(_NUM_TOKENS)]
    if witness:  # keep the witness on the module path and go's results in the log if the command sets these itself
        command = _PYTHONPATH.sub(lambda match: f"PYTHONPATH={match[1]}{WITNESS_DIRECTORY}:", command)
        command = _GOFLAGS.sub(lambda match: match[0] + ("-v " if match[1] else "-v\\ "), command)
    script = _script(nonce, tokens, command, workdir, seconds, witness, user)
    await box.write_file(f"{RUNNER_STATE}/run", script, user="root")
    try:
        result = await box.exec(
            f"chmod 700 {RUNNER_STATE} && bash {RUNNER_STATE}/run",
            user="root",
            check=False,
            timeout=seconds + _OVERHEAD_SECONDS,
        )
        output, code = result.stdout, result.exit_code
        if code == 70:
            raise UnusableBoxError(f"the grading box cannot run tests: {result.stderr.strip()[-400:]}")
    except CommandFailedError as error:  # only a time-out: the tests kept root's shell from ending them
        output, code = error.stdout, None
    return _parse_report(output, nonce, frozenset(tokens), seconds, code)


def _parse_report(output: str, nonce: str, tokens: frozenset[str], seconds: float, code: int | None) -> RunnerReport:
    _, found, rest = output.partition(f"{nonce} log\n")
    end = re.search(rf"^{nonce} end (\d+) ([01]) (\d+) (\d+)$", rest, re.MULTILINE)
    if not found or end is None:
        return RunnerReport(code if code is None else 1, output, [], lost=True)
    log, _, frames = rest[: end.start()].partition(f"\n{nonce} frames\n")
    exit_code, timed_out = int(end[1]), end[2] == "1"
    got, waited = int(end[3]) / 1e9, int(end[4]) / 1e9
    starved = timed_out and waited > _STARVED_SHARE * seconds > got
    issued = list(_issued_frames(frames, tokens))
    flags = tuple(dict.fromkeys(_flag(frame.content) for frame in issued if frame.content["kind"] == "flag"))
    return RunnerReport(
        None if timed_out else exit_code, log, _sessions(issued), starved, False, flags[:_MAX_DYNAMIC_FLAGS], got
    )


class _Frame(NamedTuple):
    token: str
    session: int
    content: JsonObject


def _issued_frames(frames: str, tokens: frozenset[str]) -> Iterator[_Frame]:
    """Yield the witnesses' reports in order. Lines without an issued token are ignored."""
    for line in frames.splitlines():
        token, _, body = line.partition(" ")
        if token not in tokens:
            continue
        try:
            content: JsonObject = orjson.loads(body)
            frame = _Frame(token, int(content["session"]), content)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        if isinstance(content.get("kind"), str):
            yield frame


def _flag(content: JsonObject) -> Flag:
    return Flag(str(content.get("what"))[:100], str(content.get("place"))[:300])


def _sessions(frames: Iterable[_Frame]) -> list[RunnerSession]:
    """Return the sessions in the order in which they began."""
    found: dict[tuple[str, int], RunnerSession] = {}
    open_top: tuple[str, int] | None = None
    for token, number, frame in frames:
        key = (token, number)
        if frame["kind"] == "begin" and key not in found:
            worker = bool(frame.get("worker"))
            found[key] = RunnerSession(
                token, number, nested=open_top is not None, worker=worker, root=str(frame.get("root", ""))
            )
            open_top = open_top or (None if worker else key)
        elif key in found:
            _record_frame(found[key], frame)
            if frame["kind"] == "end" and key == open_top:
                open_top = None
    return list(found.values())


_WORST_FIRST = ("failed", "skipped", "xfailed", "xpassed", "passed")


def worse(one: str, other: str) -> str:
    """Return the worse of two outcomes of a test."""
    return min(one, other, key=lambda outcome: _WORST_FIRST.index(outcome) if outcome in _WORST_FIRST else 0)


def _record_frame(session: RunnerSession, frame: JsonObject) -> None:
    if frame["kind"] == "end" and session.exit is None:
        session.exit = int(frame["exit"])
        session.canary = str(frame["canary"])
        session.num_missed = int(frame.get("missed", 0))
    if frame["kind"] == "module":
        _record_module(session, frame)
    if frame["kind"] != "test":
        return
    name = str(frame["name"])
    outcome = str(frame["outcome"])
    if frame.get("xfail"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed" if outcome == "passed" else "failed"
    session.tests[name] = worse(session.tests.get(name, "passed"), outcome)
    if frame.get("place"):
        session.places[name] = str(frame["place"])


def _record_module(session: RunnerSession, frame: JsonObject) -> None:
    """Add the codes of one line; those of a large file need several."""
    path = str(frame["path"]).removeprefix(session.root + "/")
    codes = frozenset(str(code) for code in frame.get("codes", ()))
    known = session.modules.get(path)
    session.modules[path] = LoadedModule(
        str(frame["file"]).removeprefix(session.root + "/"),
        codes | (known.codes if known else frozenset()),
        changed="changed" in codes or (known is not None and known.changed),
    )
