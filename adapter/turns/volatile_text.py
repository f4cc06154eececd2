"""Parts of texts that differ each time although the same was done: dates, durations, process ids, temporary names.

A command that a replayed agent runs again writes them anew. The model is shown the text that it was shown before.
"""

import re
from collections.abc import Iterable
from contextlib import suppress

import orjson

_DAY = "(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?"
_HASH = r"(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,12}"
_UNIT = "(?:[nuµm]?s|[num]?secs?|seconds?)"
_FREE_PORT = r"(?:3[3-9]\d{3}|[45]\d{4}|6[0-5]\d{3})"  # the kernel gives such a one to who asks for none
_TTY = r"(?:\?|pts/\d+)"
_VOLATILE = re.compile(
    # pytest's slowest tests: which they are, and in which order, is measured.
    r"(?P<slowest>(?:^\d+\.\d+s (?:setup|call|teardown) +\S+::.*\n)+(?:\n?\(\d+ durations < \d.*\n)?"
    r"|\n?^\(\d+ durations < \d.*\n)"
    # Dates.
    rf"|\b\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?|\b\d{{1,2}}:\d\d:\d\d(?:[.,]\d+)?\b"
    rf"|\b{_DAY}\d\d[ /]{_MONTH}[ /]\d{{4}}[ :]{_CLOCK}(?: (?:GMT|UTC|[+-]\d{{4}}))?\b"
    rf"|\b{_DAY}\b{_MONTH} {{1,2}}\d{{1,2}},?(?: +\d{{4}})?(?: +{_CLOCK})?"
    r"(?:(?<=\d:\d\d:\d\d)(?: (?:UTC|[AP]M))* \d{4})?(?: [+-]\d{4})?\b"
    # Durations, rates, and the times and memory of a process or a function.
    rf"|\b\d+(?:\.\d+)? {_UNIT}(?: ± \S+ {_UNIT})?(?= per loop\b)|(?<![\w,])\d[\d,]*(?= loops?(?:, best| each))"
    rf"|(?:(?<=\bin )(?:\d+m )?\d+|\b(?:\d+m)?\d+[.,]\d+)(?= ?{_UNIT}\b)|(?:(?<=\btime=\")|(?<=\bduration_ms ))\d+\.\d+"
    r"|^(?P<kept_test> *[✓✔✕✖√×] .*\()\d+(?= ?ms\)$)|^(?P<kept_calls> +\d+(?:/\d+)?)(?: +\d+\.\d{3}){4}(?= )"
    r"|(?:(?<= s, )[\d.]+|\b\d+\.\d+) [kKMGT]?i?B/s\b|\[[\d:]+<[\d:?]+, +[\d.?]+(?:\w+/s|s/\w+)(?=[],])"
    r"|(?<![\w.:])\d[\d.:]*(?=(?:user|system|elapsed|%CPU|avg(?:text|data)|maxresident|inputs|outputs|major|minor)\b)"
    r"|^(?P<kept_usage>\t(?:User|System|Percent|Elapsed|Maximum|Major|Minor|(?:Inv|V)oluntary|File system) .*: )[\d.:]+"
    # Temporary names, and an archive that was built now; the number of digits of its size is content.
    r"|(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b|\bpytest-\d+\b|(?<=/pip-ephem-wheel-cache-)[a-z0-9_]{8}\b"
    r"|(?<=\.whl size=)(?P<size>\d+) sha256=[0-9a-f]{64}\b"
    # What Codex, Claude Code and Qwen Code draw for a call, and the length of a result with its durations.
    r"|(?<=^Chunk ID: )[0-9a-f]{6}(?=\nWall time: )|(?<=^Original token count: )\d+(?=\nOutput:$)"
    r"|(?<=^Process running with session ID )\d+(?=\nOriginal token)|(?<=/tasks/)b[a-z0-9]{8}(?=\.output\b)"
    r"|(?<=\bbackground with ID: )b[a-z0-9]{8}(?=\. )|(?<=<task-id>)b[a-z0-9]{8}(?=</task-id>)|(?<=\bbg_)[0-9a-f]{8}\b"
    # Ids of processes; rows of `jobs -l`, `ps`, `ps aux` and `ps -ef` up to the command.
    r"|(?:(?<=\bpid: )|(?<=\bpid )|(?<=\bPID )|(?<=\bpid=)|(?<= process \[))\d+|^\[\d{1,2}\] \d{3,7}$"
    r"|(?<= )\[\d+\](?= \[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] )"
    r"|(?<=^\[\d\][-+ ] ) *\d+(?= (?:Running|Stopped|Done|Exit|Terminated|Killed)\b)"
    rf"| {{1,12}}\d+ +\d+\.\d +\d+\.\d +\d+ +\d+ +{_TTY} +(?:[DIRS]|(?P<kept_stat>[TZ]))[<NLsl+]* +"
    rf"\d\d:\d\d +\d+:\d\d(?= )|^ *\d+(?= {_TTY} +\d\d:\d\d:\d\d \S)| {{1,12}}\d+ +\d+ +\d+ \d\d:\d\d {_TTY} +"
    r"\d\d:\d\d:\d\d(?= )|(?<=^Device: )\S+\tInode: (?P<inode>\d+)"
    # Hashes of commits, ports, addresses and random ids.
    r"|(?:(?<=\bcommit )|(?<=\bHEAD is now at ))[0-9a-f]{7,40}\b|(?<=\bat )0x(?!0+\b|f+\b)[0-9a-f]{6,16}\b"
    r"|(?<=^From )[0-9a-f]{40}(?= Mon Sep 17 00:00:00 2001$)|(?<=\bstash@\{\d\} \()[0-9a-f]{40}(?=\)$)"
    rf"|(?<= ){_HASH}(?=\] )|^{_HASH}(?= \S)|(?<=^\* ){_HASH}(?= )"
    rf"|(?:(?<=\blocalhost:)|(?<=\b127\.0\.0\.1:)|(?<=\bport )|(?<=\b0\.0\.0\.0:)){_FREE_PORT}\b"
    r"|\b(?P<uuid>[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\b",
    re.MULTILINE,
)
_OF_COMMANDS = (
    (r"%s\b|%[WXYZ]\b|%T@|\btime(?:_ns)?\(\)|\bDate\.now\b", r"\b1[789]\d{8}(?:\.\d+|\d{9}|\d{3})?\b"),
    (r"\b(?:perf_counter|monotonic|time)\(\)", r"(?i:\b(?:took|elapsed|seconds)\b\W+|\btime[:=] ?)\d+\.\d+"),
    (r"\b(?:rev-parse|rev-list|merge-base)\b|format=\W?%[hH]", r"^[0-9a-f]{7,40}$"),
    (r"X{6}", r"(?P<kept_template>(?<=/tmp/)[\w-]*[._-])[A-Za-z0-9]{6,12}(?![\w-])"),
    (r"\bmktemp\b|\btempfile\b", r"(?P<kept_prefix>(?<=/tmp/)[\w.-]*?)[a-z0-9_]{8}(?![\w-])"),
)
"""Volatile parts that only the command tells from content: times, hashes of commits, other temporary names."""
_ECHOED_ID = re.compile(r"\becho [\"']?([^\"'$;&|<>`\n]*)\$[!$]([^\"'$;&|<>`\n]*)|\bprint\(os\.getpid\(\)\)")
_NO_COUNTS = re.compile(r"\s*(?:(?:sleep|cd|p?kill|export|wait|ps|pidof|p?grep(?! -\w*c))\b|.*>|$)")
_SEARCHES = re.compile(r"\s*(?:(?:cd|find|fd|rg|ag|grep (?:-\S+ )*-\w*[rR]\w*)\b(?!.*(?: -exec|xargs))|$)")
_BY_CHANCE = re.compile(
    r"(?m)^(?:ERROR: Pipe to stdout was broken|:0: UserWarning: The test results are likely unreliable\..*"
    r"|Exception ignored in: <_io\.TextIOWrapper name='<stdout>'.*\nBrokenPipeError: .*)\n"
)
_ON_PROCESSES = re.compile(
    r"(?i)(?<![a-z])(?:p?kill(?:all|pg)?|wait(?:pid)?|fg|bg|disown|jobs?|ps|pstree|top|pmap|pwdx|lsof|(?:re|io)nice"
    r"|taskset|cpulimit|nsenter|strace|gdb|gcore|proc(?:ess)?|p?pids?|terminate|terminal)(?![a-z])"
)
_IN_FILE_OR_ID = r"(?:/|[A-Za-z_][.-]|(?:(?:\b|_)id|Id)\W{1,4})"


def without_volatile(text: str, command: str = "") -> str:
    """Return the text with a mark for each volatile part, so that texts that differ only in them become equal. Which
    ids are the same within the text, and which processes are stopped or zombies, makes a difference. `command`: the
    one that has written the text. Rows of `ps` on itself and on what starts beside it are left out: it sees them
    before or after their exec. The order of what a search of files finds makes no difference."""
    seen: dict[str, int] = {}

    def mark(match: re.Match[str]) -> str:
        if one := match["uuid"] or match["inode"]:
            return f"\0{seen.setdefault(one, len(seen))}"
        kept = "".join(part or "" for name, part in match.groupdict().items() if name.startswith("kept"))
        return f"\0{kept}{len(match['size'] or '') or ''}"

    steps = re.split(r"\n|;|&&|\|\|", command)
    listing = next((step for step in steps if re.search(r"\bps\b", step)), "")
    beside = [one.strip() for one in re.split("[&|]", re.sub(r"\d?>+(?:&\d|\s*\S+)|['\"]", "", listing))]
    own = tuple(f" {one}" for one in [*beside, command] if listing and one)
    text = _BY_CHANCE.sub("", _unescaped(text) + "\n")
    lines = (line for line in text.split("\n") if not line.endswith(own))
    marked = _pattern(text, command).sub(mark, "\n".join(lines))
    return "\n".join(sorted(marked.split("\n"))) if command and all(map(_SEARCHES.match, steps)) else marked


def _unescaped(text: str) -> str:
    """Return a result in JSON, such as mini-swe-agent's, with each string unescaped and on lines of its own."""
    with suppress(orjson.JSONDecodeError):
        if text.startswith("{") and orjson.loads(text):
            return re.sub(r'"(?:[^"\\]|\\.)*"', lambda match: f'"\n{orjson.loads(match[0])}\n"', text)
    return text


def _pattern(text: str, command: str) -> re.Pattern[str]:
    """Return the pattern of the volatile parts of a text that the command has written."""
    more = [written for asks, written in _OF_COMMANDS if re.search(asks, command)]
    for before, after in _ECHOED_ID.findall(command):
        line = rf"(?<=^{re.escape(before)})\d+(?={re.escape(after.rstrip())}$)"
        if len(re.findall(line, text, re.MULTILINE)) == 1:  # of several, some may be counts
            more.append(line)
    programs = re.split(r"[;&|\n]+", re.sub(r"2>(?:&\d|\s*\S+)", "", command))
    if re.search(r"\b(?:pgrep|pidof)\b", command) and all(map(_NO_COUNTS.match, programs)):
        more.append(r"^\d+(?: \d+)*$")
    return re.compile("|".join([*more, _VOLATILE.pattern]), re.MULTILINE) if more else _VOLATILE


def volatile_words(text: str, command: str = "") -> set[str]:
    """Return the first and the last word of each volatile part, such as the id of a process or a temporary name."""
    text = _unescaped(text)
    words = (match.group().split() for match in _pattern(text, command).finditer(text) if not match["slowest"])
    return {word for part in words if part for word in (part[0], part[-1])}


def names_any(arguments: str, words: Iterable[str]) -> bool:
    """Return whether the arguments of calls, as JSON, name one of the words. A small number is a name only in calls
    that handle processes, and in the name of a file or an id; elsewhere it is a count, a line or a time limit."""
    arguments = re.sub(r"\\[nrt]", " ", arguments)  # a name may stand behind such a character
    of_small = _IN_FILE_OR_ID if _ON_PROCESSES.search(arguments) is None else ""
    places = ((of_small if re.fullmatch(r"\d{1,3}([.,]\d+)?", word) else "", word) for word in words)
    return any(re.search(rf"{place}(?<!\w){re.escape(word)}(?!\w)", arguments) for place, word in places)
