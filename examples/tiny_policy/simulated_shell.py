"""Simulate bash, cat, sed and a repository's check without a process, for the thousands of transcripts of the warm
start.

The text must equal that of a box; a unit test compares it with the real programs.
"""

import re

from activities.harnesses.bash_agent.agent import format_observation

Files = dict[str, str]

CAT = re.compile(r"cat (\S+)")
ALL_SOURCES = "*.py"
CHECK_FILE = "check"
CHECK, PASSED, FAILED = f"./{CHECK_FILE}", "OK", "FAIL"
SUBSTITUTE = re.compile(r"sed -i 's/((?:\\.|[^/\\\n])*)/((?:\\.|[^/\\\n])*)/(g?)' (\S+)")


def run_command(command: str, files: Files, fixed_files: Files | None = None) -> str:
    """Return the observation of `cat FILE`, `cat *.py`, `sed -i 's/OLD/NEW/' FILE` or `./check`, or of several that are
    joined by `&&`.

    sed changes `files`. The check is there if `files` has it, and passes if they equal `fixed_files`. Other commands
    give an error.
    """
    output, exit_code = "", 0
    for part in command.strip().split(" && "):
        if exit_code == 0:
            more, exit_code = _run_part(part, files, fixed_files)
            output += more
    return format_observation(output.encode(), exit_code)


def _run_part(command: str, files: Files, fixed_files: Files | None) -> tuple[str, int]:
    if match := CAT.fullmatch(command):
        if match[1] == ALL_SOURCES:
            return "".join(files[name] for name in sorted(files) if name.endswith(".py")), 0
        if match[1] not in files:
            return f"cat: {match[1]}: No such file or directory\n", 1
        return files[match[1]], 0
    if match := SUBSTITUTE.fullmatch(command):
        old, new, every, file = match.groups()
        if file not in files:
            return f"sed: can't read {file}: No such file or directory\n", 2
        return substitute(old, new, bool(every), file, files)
    if command == CHECK and CHECK_FILE in files:
        return (f"{PASSED}\n", 0) if files == fixed_files else (f"{FAILED}\n", 1)
    return f"bash: line 1: {command.split(' ')[0]}: command not found\n", 127


def substitute(old: str, new: str, every: bool, file: str, files: Files) -> tuple[str, int]:
    replacement = re.sub(r"\\(.)", r"\1", new)
    try:
        pattern = re.compile(basic_to_python(old))
    except re.error:
        return "sed: -e expression #1, char 1: Invalid preceding regular expression\n", 1
    lines = files[file].splitlines(keepends=True)
    files[file] = "".join(pattern.sub(lambda _: replacement, line, count=0 if every else 1) for line in lines)
    return "", 0


def basic_to_python(pattern: str) -> str:
    """Translate a POSIX basic regular expression to Python: `+?{}()|` and a leading `*` are plain characters."""
    parts: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            parts.append(re.escape(next(characters, "\\")))
        elif character in "+?{}()|" or (character == "*" and not parts):
            parts.append("\\" + character)
        else:
            parts.append(character)
    return "".join(parts)


def quote_pattern(text: str) -> str:
    """Return a sed pattern that matches `text` exactly."""
    return re.sub(r"([\[\]*.^$\\/])", r"\\\1", text)


def quote_replacement(text: str) -> str:
    return re.sub(r"([/&\\])", r"\\\1", text)
