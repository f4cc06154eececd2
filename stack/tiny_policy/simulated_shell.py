"""Simulate bash, cat and sed on one file without a process, for the thousands of transcripts of the warm start.

The text must equal that of a box; a unit test compares it with the real programs.
"""

import re

from activities.harnesses.bash_agent.agent import format_observation

Files = dict[str, str]

CAT = re.compile(r"cat (\S+)")
SUBSTITUTE = re.compile(r"sed -i 's/((?:\\.|[^/\\\n])*)/((?:\\.|[^/\\\n])*)/(g?)' (\S+)")


def run_command(command: str, files: Files) -> str:
    """Return the observation of `cat FILE` or `sed -i 's/OLD/NEW/' FILE`; sed changes `files`. Other commands give an
    error.
    """
    stripped = command.strip()
    if match := CAT.fullmatch(stripped):
        if match[1] in files:
            return simulate(files[match[1]])
        return simulate(f"cat: {match[1]}: No such file or directory\n", 1)
    if match := SUBSTITUTE.fullmatch(stripped):
        old, new, every, file = match.groups()
        if file not in files:
            return simulate(f"sed: can't read {file}: No such file or directory\n", 2)
        return substitute(old, new, bool(every), file, files)
    return simulate(f"bash: line 1: {stripped.split(' ')[0]}: command not found\n", 127)


def substitute(old: str, new: str, every: bool, file: str, files: Files) -> str:
    replacement = re.sub(r"\\(.)", r"\1", new)
    try:
        pattern = re.compile(basic_to_python(old))
    except re.error:
        return simulate("sed: -e expression #1, char 1: Invalid preceding regular expression\n", 1)
    lines = files[file].splitlines(keepends=True)
    files[file] = "".join(pattern.sub(lambda _: replacement, line, count=0 if every else 1) for line in lines)
    return simulate("")


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


def simulate(output: str, exit_code: int = 0) -> str:
    return format_observation(output.encode(), exit_code)


def quote_pattern(text: str) -> str:
    """Return a sed pattern that matches `text` exactly."""
    return re.sub(r"([\[\]*.^$\\/])", r"\\\1", text)


def quote_replacement(text: str) -> str:
    return re.sub(r"([/&\\])", r"\\\1", text)
