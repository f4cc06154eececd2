"""Parts of texts that differ each time although the same was done: dates, durations, process ids, temporary names.

A command that a replayed agent runs again writes them anew. The model is shown the text that it was shown before.
"""

import re
from collections.abc import Iterable

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_SHORT_HASH = r"(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,12}"
_UNIT = "(?:[num]s|s|[num]?secs?|seconds?)"
_FREE_PORT = r"(?:3[3-9]\d{3}|[45]\d{4}|6[0-5]\d{3})"  # the kernel gives such a one to who asks for none
_TTY = r"(?:\?|pts/\d+)"
_VOLATILE = re.compile(
    "|".join(
        (
            # pytest's slowest tests: which they are, and in which order, is measured.
            r"(?P<slowest>(?:^\d+\.\d+s (?:setup|call|teardown) +\S+::.*\n)+(?:\n?\(\d+ durations < \d.*\n)?"
            r"|\n?^\(\d+ durations < \d.*\n)",
            rf"\b\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?",
            rf"(?:\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?\b{_MONTH} {{1,2}}\d{{1,2}},?(?: +\d{{4}})?(?: +{_CLOCK})?"
            r"(?:(?<=\d:\d\d:\d\d)(?: (?:UTC|[AP]M))* \d{4})?(?: [+-]\d{4})?\b",
            r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b",
            rf"\b\d+(?:\.\d+)? {_UNIT}(?= per loop\b)|(?<=\bin )\d+(?= ?{_UNIT}\b)",
            rf"\b(?:\d+m)?\d+[.,]\d+(?= ?{_UNIT}\b)",
            r"(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b",
            r"(?<=\bbg_)[0-9a-f]{8}\b|\bpytest-\d+\b|(?:(?<=\btime=\")|(?<=\bduration_ms ))\d+\.\d+",
            r"(?<=^pid: )\d+$|(?<=\bpid )\d+|(?<=\bPID )\d+|(?<=\bpid=)\d+|^\[\d{1,2}\] \d{3,7}$",
            # What Codex, Claude Code and Qwen Code draw for a call, and the length of a result with its durations.
            r"(?<=^Chunk ID: )[0-9a-f]{6}(?=\nWall time: )|(?<=^Original token count: )\d+(?=\nOutput:$)",
            r"(?<=^Process running with session ID )\d+(?=\nOriginal token)|(?<=/tasks/)b[a-z0-9]{8}(?=\.output\b)",
            r"(?<=\bbackground with ID: )b[a-z0-9]{8}(?=\. )|(?<=<task-id>)b[a-z0-9]{8}(?=</task-id>)",
            # Rows of `jobs -l`, `ps aux` and `ps -ef`, up to the command.
            r"(?<=^\[\d\][-+ ] ) *\d+(?= (?:Running|Stopped|Done|Exit|Terminated|Killed)\b)",
            rf" {{1,12}}\d+ +\d+\.\d +\d+\.\d +\d+ +\d+ +{_TTY} +(?:[DIRS]|(?P<stat>[TZ]))[<NLsl+]* +"
            r"\d\d:\d\d +\d+:\d\d(?= )",
            rf" {{1,12}}\d+ +\d+ +\d+ \d\d:\d\d {_TTY} +\d\d:\d\d:\d\d(?= )|(?<=^Device: )\S+\tInode: (?P<inode>\d+)",
            r"(?<=\bcommit )[0-9a-f]{7,40}\b|(?<=\bHEAD is now at )[0-9a-f]{7,40}\b",
            r"(?<=^From )[0-9a-f]{40}(?= Mon Sep 17 00:00:00 2001$)|(?<=\bstash@\{\d\} \()[0-9a-f]{40}(?=\)$)",
            rf"(?<= ){_SHORT_HASH}(?=\] )|^{_SHORT_HASH}(?= \S)|(?<=^\* ){_SHORT_HASH}(?= )",
            rf"(?:(?<=\blocalhost:)|(?<=\b127\.0\.0\.1:)|(?<=\bport )|(?<=\b0\.0\.0\.0:)){_FREE_PORT}\b",
            r"(?<=\bat )0x(?!0+\b|f+\b)[0-9a-f]{6,16}\b",
            r"\b(?P<uuid>[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\b",
        )
    ),
    re.MULTILINE,
)
_ON_PROCESSES = re.compile(
    r"(?<![a-z])(?:p?kill(?:all|pg)?|wait(?:pid)?|fg|bg|disown|jobs?|ps|pstree|top|pmap|pwdx|lsof|(?:re|io)nice|taskset"
    r"|cpulimit|nsenter|strace|gdb|gcore|proc(?:ess)?|p?pids?|terminate|terminal)(?![a-z])",
    re.IGNORECASE,
)
_IN_FILE_OR_ID = r"(?:/|[A-Za-z_][.-]|(?:(?:\b|_)id|Id)\W{1,4})"


def without_volatile(text: str) -> str:
    """Return the text with a mark for each volatile part, so that texts that differ only in them become equal. Which
    ids are the same within the text, and which processes are stopped or zombies, makes a difference."""
    seen: dict[str, int] = {}

    def mark(match: re.Match[str]) -> str:
        one = match["uuid"] or match["inode"]
        return f"\0{seen.setdefault(one, len(seen)) if one else match['stat'] or ''}"

    return _VOLATILE.sub(mark, text)


def volatile_words(text: str) -> set[str]:
    """Return the first and the last word of each volatile part, such as the id of a process or a temporary name."""
    words = (match.group().split() for match in _VOLATILE.finditer(text) if not match["slowest"])
    return {word for part in words if part for word in (part[0], part[-1])}


def names_any(arguments: str, words: Iterable[str]) -> bool:
    """Return whether the arguments of calls, as JSON, name one of the words. A small number is a name only in calls
    that handle processes, and in the name of a file or an id; elsewhere it is a count, a line or a time limit."""
    arguments = re.sub(r"\\[nrt]", " ", arguments)  # a name may stand behind such a character
    of_small = _IN_FILE_OR_ID if _ON_PROCESSES.search(arguments) is None else ""
    places = ((of_small if re.fullmatch(r"\d{1,3}([.,]\d+)?", word) else "", word) for word in words)
    return any(re.search(rf"{place}(?<!\w){re.escape(word)}(?!\w)", arguments) for place, word in places)
