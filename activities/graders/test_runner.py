"""Runs a test command in a grading box and brings back what can be believed about it.

Why here: every grader needs the same care: unprivileged, bounded in time and output, nothing left running, a log that cannot be forged.
Called by: the graders of this folder.

The report comes from root's own shell in the box, framed by a nonce that lies in a file only root can read and that is new for every
run. Where pytest runs, `ratchet_witness` (loaded into it) says over a pipe what each test did; the pipe cannot be taken back, so a
runner that dies early leaves a beginning without an end.
"""

import re
import secrets
import shlex
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import orjson

from activities.sandboxes.base import Sandbox
from ratchet.errors import CommandFailedError, GraderFailedError

RUNNER_STATE = "/run/ratchet"
_NUM_TOKENS = 500
_TOKEN_BYTES = 16
_HEAD_BYTES, _TAIL_BYTES = 6_000_000, 2_000_000
_OVERHEAD_SECONDS = 60.0
_STARVED_SHARE = 0.5
"""Of the time allowed: test processes that stood in line this long for a core did not have their time."""
_PYTHONPATH = re.compile(r"\bPYTHONPATH=([\"']?)")


@dataclass(slots=True)
class RunnerSession:
    """One run of pytest as its witness saw it. `tests`: node id → outcome, the worst where one was told twice. `exit` None: no end."""

    token: str
    number: int
    nested: bool = False
    exit: int | None = None
    canary: str = "none"
    tests: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    root: str = ""


@dataclass(slots=True, frozen=True)
class RunnerReport:
    """What came of a test command. `exit_code` None: it ran out of time. `starved`: it had to wait for a core most of its time."""

    exit_code: int | None
    log: str
    sessions: list[RunnerSession]
    starved: bool = False
    lost: bool = False

    @property
    def top_sessions(self) -> list[RunnerSession]:
        """Without those that tests started themselves."""
        return [session for session in self.sessions if not session.nested]


def _resource(name: str) -> str:
    return (files("activities.graders") / "box" / name).read_text()


def _script(nonce: str, tokens: list[str], command: str, workdir: str, seconds: float, witness: bool) -> str:
    values = {
        "NONCE": nonce,
        "TOKENS": " ".join(tokens),
        "SECONDS_ALLOWED": f"{seconds:.3f}",
        "COMMAND_FILE": f"{RUNNER_STATE}/command",
        "WORKDIR": workdir,
        "HEAD_BYTES": str(_HEAD_BYTES),
        "TAIL_BYTES": str(_TAIL_BYTES),
        "WITNESS": "1" if witness else "",
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    for name, text in (("command", command), ("ratchet_witness.py", _resource("ratchet_witness.py"))):
        end = f"END_{secrets.token_hex(8)}"
        lines.append(f"cat > {RUNNER_STATE}/{name} <<'{end}'\n{text}\n{end}")
    return "\n".join([*lines, _resource("run_tests.sh")])


async def run_tests(box: Sandbox, command: str, workdir: str, seconds: float, witness: bool = True) -> RunnerReport:
    """Runs `command` as the box's unprivileged user; its processes are dead when this returns.

    Raises GraderFailedError where the box cannot run it at all, and the box's own errors.
    """
    nonce, tokens = secrets.token_hex(_TOKEN_BYTES), [secrets.token_hex(_TOKEN_BYTES) for _ in range(_NUM_TOKENS)]
    if witness:  # a command that sets the module path itself must not lose the witness
        command = _PYTHONPATH.sub(lambda match: f"PYTHONPATH={match[1]}/run/ratchet-witness:", command)
    await box.write_file(f"{RUNNER_STATE}/run", _script(nonce, tokens, command, workdir, seconds, witness), user="root")
    try:
        result = await box.exec(
            f"chmod 700 {RUNNER_STATE} && bash {RUNNER_STATE}/run",
            user="root",
            check=False,
            timeout=seconds + _OVERHEAD_SECONDS,
        )
        output, code = result.stdout, result.exit_code
        if code == 70:
            raise GraderFailedError(f"the grading box cannot run tests: {result.stderr.strip()[-400:]}")
    except CommandFailedError as error:  # only its time-out: the tests left root's own shell no room to end them
        output, code = error.stdout, None
    return _read(output, nonce, frozenset(tokens), seconds, code)


def _read(output: str, nonce: str, tokens: frozenset[str], seconds: float, code: int | None) -> RunnerReport:
    _, found, rest = output.partition(f"{nonce} log\n")
    end = re.search(rf"^{nonce} end (\d+) ([01]) (\d+) (\d+)$", rest, re.MULTILINE)
    if not found or end is None:
        return RunnerReport(code if code is None else 1, output, [], lost=True)
    log, _, frames = rest[: end.start()].partition(f"\n{nonce} frames\n")
    exit_code, timed_out, waited = int(end[1]), end[2] == "1", int(end[4])
    starved = timed_out and waited / 1e9 > _STARVED_SHARE * seconds
    return RunnerReport(None if timed_out else exit_code, log, _sessions(frames, tokens), starved)


def _sessions(frames: str, tokens: frozenset[str]) -> list[RunnerSession]:
    """Sessions in the order in which they began. Lines without a token that was given out are nobody's."""
    found: dict[tuple[str, int], RunnerSession] = {}
    open_top: tuple[str, int] | None = None
    for line in frames.splitlines():
        token, _, body = line.partition(" ")
        if token not in tokens:
            continue
        try:
            frame: dict[str, Any] = orjson.loads(body)
            key = (token, int(frame["session"]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        if frame["kind"] == "begin" and key not in found:
            found[key] = RunnerSession(token, key[1], nested=open_top is not None, root=str(frame.get("root", "")))
            open_top = open_top or key
        elif key in found:
            _take(found[key], frame)
            if frame["kind"] == "end" and key == open_top:
                open_top = None
    return list(found.values())


_WORST_FIRST = ("failed", "skipped", "xfailed", "xpassed", "passed")


def _take(session: RunnerSession, frame: dict[str, Any]) -> None:
    if frame["kind"] == "end" and session.exit is None:
        session.exit, session.canary = int(frame["exit"]), str(frame["canary"])
    if frame["kind"] != "test":
        return
    name, outcome = str(frame["name"]), str(frame["outcome"])
    if frame.get("xfail"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed" if outcome == "passed" else "failed"
    known = session.tests.get(name, "passed")
    session.tests[name] = min(known, outcome, key=lambda one: _WORST_FIRST.index(one) if one in _WORST_FIRST else 0)
    if frame.get("place"):
        session.places[name] = str(frame["place"])
