"""Decide whether a box blames the patch if no test failed in it, or if its log has a message of a full machine.

The way in which such a run ended is a suspicion, because a machine that kills processes, loses files or is too slow
ends a run in the same way. The patch is to blame if two boxes show the same suspicion.
"""

import re
from collections.abc import Collection, Iterable
from itertools import islice
from typing import NamedTuple

from grading.base import TestRun
from grading.diff_sections import FileChange
from grading.evidence import SIGNALLED
from grading.printed_results import find_missing_program
from ratchet.errors import SuspectPatchError
from ratchet.machine_faults import told_refusal
from ratchet.types import Suspicion

_MAX_NAMED = 300
"""Changed files that are looked for in a log."""


def raise_unless_seen_before(suspicion: Suspicion, seen: str, suspected: Collection[Suspicion], log: str = "") -> None:
    """Raise SuspectPatchError, unless an earlier box had the suspicion; a full machine in `log` is one of its own."""
    suspicion = Suspicion.REFUSED if told_refusal(log) else suspicion
    if suspicion not in suspected:
        raise SuspectPatchError(f"{seen}; a second box shows whose fault it is", suspicion)


class RunEnd(NamedTuple):
    """The way in which a run ended. `words`: the beginning of a sentence."""

    suspicion: Suspicion
    words: str


def end_of(run: TestRun) -> RunEnd:
    """Return the end of a run in which no test that counts failed. The patch, or a machine that kills processes, loses
    files or is too slow, can cause each of these."""
    observed = run.observed
    if observed.lost:
        return RunEnd(Suspicion.KILLED, "the test process died before it reported")
    if observed.exit_code is None:
        return RunEnd(Suspicion.TIMED_OUT, f"no test had failed when the tests' {run.limit_seconds:.0f} s were over")
    cut = ""
    if any(session.exit is None for session in observed.top_sessions):
        cut = "pytest began and never ended"
    elif any(session.num_missed for session in observed.top_sessions):
        cut = "collected tests never ran"
    suspicion = Suspicion.KILLED if cut or observed.exit_code > SIGNALLED else Suspicion.NO_TEST
    told = run.gap or cut or f"no test that counts is named as failed (exit code {observed.exit_code})"
    return RunEnd(suspicion, told)


def names_change(log: str, changes: Iterable[FileChange]) -> bool:
    """Return whether a log names a line of a file that the patch changed, or a file that it removed or replaced.

    Compilers and tracebacks do; so a run without a test is shown to be the patch's deed. Warnings are none, and if a
    program is missing, only a file that is gone explains it.
    """
    is_missing = bool(find_missing_program(log))
    lines = [line for line in log.splitlines() if "warning" not in line.lower()]
    for change in islice(changes, _MAX_NAMED):
        name = change.path.rpartition("/")[2]
        if (change.is_gone or not is_missing) and any(
            name in line and re.search(_mention_of(change), line) for line in lines
        ):
            return True
    return False


def _mention_of(change: FileChange) -> str:
    parts = change.path.split("/")
    last_two, name = re.escape("/".join(parts[-2:])), re.escape(parts[-1])
    line = r"""(?:(?:["']?,? (?:on )?line |[:(])\d|["']?: .{0,200}\bline \d)"""
    place = r"(?![\w.-])" if change.is_gone else line
    return rf"""(?:(?<![\w.-]){last_two}|(?:^|[\s"'(]|\./){name}){place}"""
