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
_FREE_PORT = r"(?:32(?:769|7[7-9]\d|[89]\d\d)|3[3-9]\d{3}|[45]\d{4}|60\d{3})"  # one that the kernel gives
_TTY = r"(?:\?|pts/\d+)"
_VOLATILE = re.compile(
    # pytest's slowest tests: which they are, and in which order, is measured.
    r"(?P<slowest>(?:^\d{1,9}\.\d+s (?:setup|call|teardown) {1,9}(?>\S+?::).*+\n)+(?:\n?\(\d+ durations < \d.*\n)?"
    r"|\n?^\(\d+ durations < \d.*\n)"
    # Dates and durations.
    rf"|\b\d{{4}}-\d\d-\d\d(?:[T ]{_CLOCK}(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?)?|\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"
    rf"|\b{_DAY}\d\d[ /]{_MONTH}[ /]\d{{4}}[ :]{_CLOCK}(?: (?:GMT|UTC|[+-]\d{{4}}))?\b"
    rf"|\b{_DAY}\b{_MONTH} {{1,2}}\d{{1,2}},?(?: +\d{{4}})?(?: +{_CLOCK})?"
    r"(?:(?<=\d:\d\d:\d\d)(?: (?:UTC|[AP]M))* \d{4})?(?: [+-]\d{4})?\b"
    rf"|\b\d+(?:\.\d+)? {_UNIT}(?: ± [\d.]{{1,9}} {_UNIT})?(?= per loop\b)|(?<= runs, )[\d,]{{1,9}}(?= loops? each)"
    rf"|(?<![\w,])\d{{1,9}}(?= loops?, best of \d{{1,3}}: [\d.]{{1,9}} {_UNIT} per loop$)"
    rf"|(?<=The worst time \()[\d.]+ {_UNIT}\) was more than four times slower than the best time \([\d.]+ {_UNIT}\)"
    rf"|(?:(?<=\bin )(?:\d+m )?\d+|\b(?:\d+m)?\d+[.,]\d+)(?= ?{_UNIT}\b)|(?:(?<=\btime=\")|(?<=\bduration_ms ))\d+\.\d+"
    # What GNU time measures of a program that does not swap; the number of digits of the memory is content.
    r"|^\d+\.\d\duser \d+\.\d\dsystem \d+:\d\d[.:]\d\delapsed [\d?]+%CPU \(0avgtext\+0avgdata (?P<size_kib>\d+)"
    r"maxresident\)k\n\d+inputs\+\d{1,4}outputs \(\d{1,3}major\+\d+minor\)pagefaults 0swaps$"
    # Temporary names, and an archive that was built now; the number of digits of its size is content.
    r"|(?<=/)tmp(?:\.[A-Za-z0-9]{6,12}|[a-z0-9_]{8})\b|\bpytest-\d+\b|(?<=/pip-ephem-wheel-cache-)[a-z0-9_]{8}\b"
    r"|(?<=\.whl size=)(?P<size>\d+) sha256=[0-9a-f]{64}\b"
    # What Codex, Claude Code and Qwen Code draw for a call, and the length of a result with its durations.
    r"|(?<=^Chunk ID: )[0-9a-f]{6}(?=\nWall time: )|(?<=^Original token count: )\d+(?=\nOutput:$)"
    r"|(?<=^Process running with session ID )\d+(?=\nOriginal token)|(?<=/tasks/)b[a-z0-9]{8}(?=\.output\b)"
    r"|(?<=\bbackground with ID: )b[a-z0-9]{8}(?=\. )|(?<=<task-id>)b[a-z0-9]{8}(?=</task-id>)|(?<=\bbg_)[0-9a-f]{8}\b"
    # Ids of processes; rows of `jobs -l`, `ps`, `ps aux` and `ps -ef` up to the command.
    r"|(?:(?<=\bpid: )|(?<=\bpid )|(?<=\bPID )|(?<=\bpid=)|(?<= server process \[))\d+|^\[\d{1,2}\] \d{3,7}$"
    r"|(?<=^\[\d\][-+ ] ) *\d+(?= (?:Running|Stopped|Done|Exit|Terminated|Killed)\b)|(?<=^Process Group PGID: )\d+"
    rf"| {{1,12}}\d+ +\d+\.\d +\d+\.\d +\d+ +\d+ +{_TTY} +(?:[DIRS]|(?P<stat>[TZ]))[<NLsl+]* +"
    rf"\d\d:\d\d +\d+:\d\d(?= )|^ *\d+(?= {_TTY} +\d\d:\d\d:\d\d \S)| {{1,12}}\d+ +\d+ +\d+ \d\d:\d\d {_TTY} +"
    r"\d\d:\d\d:\d\d(?= )|(?<=^Device: )\S+\tInode: (?P<one_inode>\d+)"
    # Hashes of commits, ports, addresses and random ids.
    r"|(?:(?<=\bcommit )|(?<=\bHEAD is now at ))[0-9a-f]{7,40}\b|(?<=\bat )0x(?!0+\b|f+\b)[0-9a-f]{6,16}\b"
    r"|(?<=^From )[0-9a-f]{40}(?= Mon Sep 17 00:00:00 2001$)|(?<=\bstash@\{\d\} \()[0-9a-f]{40}(?=\)$)"
    rf"|(?<= ){_HASH}(?=\] )|^{_HASH}(?= \S)|(?<=^\* ){_HASH}(?= )"
    rf"|(?:(?<=\blocalhost:)|(?<=\b127\.0\.0\.1:)|(?<=\bport )|(?<=\b0\.0\.0\.0:)){_FREE_PORT}\b"
    r"|\b(?P<one_uuid>[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\b",
    re.MULTILINE,
)
_WORD = r"""(?!['"]*-)(?:[\w./*?=+:,@%~^-]|'[^'\n]*+'|"(?:[^"$`\\\n]|\\[^"\n])*+")++"""
_OF_PROGRAMS = (  # and the volatile parts of what one such program writes, or several of `date`
    (r"git (?:rev-parse|merge-base)(?: [\w./~^@-]{1,99}){1,9}", r"^(?P<one>(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{7,40})$"),
    (r"(?:(?:^|; )date(?: -u)?(?: ['\"]?\+[\w%:.-]*['\"]?)?)++", r"^1[789]\d{8}(?:\.?\d{9})?$"),
    (rf"(?:pgrep|pidof)(?: -[fxno])*+(?: {_WORD})++", r"^\d{1,7}$"),
)
_ECHOED_ID = re.compile(r"echo \"?([^\"'$|<>`\\]*)\$!([^\"'$|<>`\\]*)\"?")
_SEARCH = re.compile(  # such that files are named and lines are numbered: what one file gives keeps its order
    rf"find(?: (?:-(?:i?name|path|type|not|[oa]|m(?:ax|in)depth|prune|print|empty)(?= |$)|\\[()]|!|{_WORD}))*+"
    r"|grep (?:-n -|-(?=\w{0,8}[nl]))(?=\w{0,8}[rR])[rRnliIwxEFsHP]{1,9}"
    rf"(?: (?:--(?:include|exclude|exclude-dir)=)?{_WORD})++"
)
_SILENT = re.compile(
    r"\s*+(?:(?:cd|cp|mkdir|mv|rm|touch|sleep|kill|wait|true)(?: (?:-[rfp9]{1,2}|[\w./~*][\w./~*-]*+))*+"
    r"|[\w./ =:-]++(?<! \d)>>? ?(?!\S*(?:dev/(?!null)|proc/))[\w./-]++ 2>&1)?\s*+"
)
_ON_PROCESSES = re.compile(
    r"(?i)(?<![a-z])(?:p?kill(?:all|pg)?|wait(?:pid)?|fg|bg|disown|jobs?|ps|pstree|top|pmap|pwdx|lsof|(?:re|io)nice"
    r"|taskset|cpulimit|nsenter|strace|gdb|gcore|proc(?:ess)?|p?pids?|terminate|terminal)(?![a-z])"
)
_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\u003c": "<", r"\u003e": ">", r"\u0026": "&", r"\u0027": "'"}
_IN_FILE_OR_ID = r"(?:/|[A-Za-z_][.-]|(?:(?:\b|_)id|Id)\W{1,4})"


def without_volatile(text: str, command: str = "") -> str:
    """Return the text with a mark for each volatile part, so that texts that differ only in them become equal. Which
    ids are the same and which processes are stopped or zombies makes a difference, the order of a search none."""
    seen: dict[str, int] = {}

    def mark(match: re.Match[str]) -> str:
        name, part = match.lastgroup or "", match[match.lastgroup or 0]
        number = seen.setdefault(part, len(seen)) if name.startswith("one") else ""
        return f"\0{number}{part if name == 'stat' else len(part) if name.startswith('size') else ''}"

    text = _unescaped(text)
    for pattern in _patterns(text, command):
        text = pattern.sub(mark, text)
    is_search = len(programs := _printing(command)) == 1 and _SEARCH.fullmatch(programs[0])
    return "\n".join(sorted(text.split("\n"))) if is_search else text


def _unescaped(text: str) -> str:
    """Return the text with the output in Qwen Code's report and mini-swe-agent's JSON as lines; other escapes stay."""
    text = re.sub(r"^(Directory: .*\nOutput: )", "\\1\0\n", text, count=1, flags=re.MULTILINE)
    lines = re.search(r'(?<="output":)\s*+"((?:[^"\\]++|\\.)*+)', text)
    with suppress(orjson.JSONDecodeError):
        of = orjson.loads(text) if lines and text.startswith("{") else {}
        if lines and isinstance(of.get("output"), str) and of.keys() <= {"returncode", "output", "exception_info"}:
            shown = re.sub(r"\\(?:u[0-9a-f]{4}|.)", lambda match: _ESCAPED.get(match[0], match[0]), lines[1])
            return f"{text[: lines.start(1)]}\0\n{shown}\n{text[lines.end(1) :]}"
    return text


def _printing(command: str) -> list[str]:
    """Return the programs of a command that may print; none of a long command."""
    steps = re.split(r"\n|;|&&|(?<!>)&", command) if len(command) <= 4096 else []
    return [re.sub(r" 2>(?:&1|/dev/null)$", "", step.strip()) for step in steps if not _SILENT.fullmatch(step)]


def _patterns(text: str, command: str) -> list[re.Pattern[str]]:
    """Return the patterns of volatile parts; a program's own ones if no other one of the command can write such."""
    programs = _printing(command)
    own = [written for asks, written in _OF_PROGRAMS if re.fullmatch(asks, "; ".join(programs))]
    if programs and (echo := _ECHOED_ID.fullmatch(programs[-1])):
        is_told = len(programs) == 2 and echo[1] and re.search(r"[^&>]&\s*+echo\b", command)  # it surely prints
        line = rf"(?<=^{re.escape(echo[1])})\d{{1,7}}(?={re.escape(echo[2].rstrip())}$)"
        own = [line] if (len(programs) == 1 or is_told) and len(re.findall(line, text, re.MULTILINE)) == 1 else []
    return [*(re.compile(one, re.MULTILINE) for one in own), _VOLATILE]


def volatile_words(text: str, command: str = "") -> set[str]:
    """Return the first and the last word of each volatile part, such as the id of a process or a temporary name."""
    text = _unescaped(text)
    found = (one for kind in _patterns(text, command) for one in kind.finditer(text) if one.lastgroup != "slowest")
    return {word for match in found if (part := match.group().split()) for word in (part[0], part[-1])}


def names_any(arguments: str, words: Iterable[str]) -> bool:
    """Return whether the arguments of calls, as JSON, name one of the words. A small number is a name only in calls
    that handle processes, and in the name of a file or an id; elsewhere it is a count, a line or a time limit."""
    arguments = re.sub(r"\\[nrt]", " ", arguments)  # a name may stand behind such a character
    of_small = _IN_FILE_OR_ID if _ON_PROCESSES.search(arguments) is None else ""
    words = (re.escape(word[:7]) + r"\w*" if len(word) == 40 else re.escape(word) for word in words)
    places = ((of_small if re.fullmatch(r"\d{1,3}(\\?[.,]\d+)?", word) else "", word) for word in words)
    return any(re.search(rf"{place}(?<!\w){word}(?!\w)", arguments) for place, word in places)
