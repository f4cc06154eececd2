"""What bash, cat and sed would do to one file, without a process: thousands of warm-start transcripts need it.

Why here: transcripts must say exactly what a box says; a unit test compares this with the real programs.
Called by: `transcripts.py` and `solving.py`.
"""

import re

from activities.harnesses.bash_agent.agent import format_observation

Files = dict[str, str]

CAT = re.compile(r"cat (\S+)")
SUBSTITUTE = re.compile(r"sed -i 's/((?:\\.|[^/\\\n])*)/((?:\\.|[^/\\\n])*)/(g?)' (\S+)")


def run_command(command: str, files: Files) -> str:
    """The observation of `cat FILE` and `sed -i 's/OLD/NEW/' FILE`, of which sed changes `files`; an error for all else."""
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
    """A POSIX basic regular expression as a Python one: `+?{}()|` are plain characters there, and so is a leading `*`."""
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
    """`text` as a sed pattern that matches exactly it."""
    return re.sub(r"([\[\]*.^$\\/])", r"\\\1", text)


def quote_replacement(text: str) -> str:
    return re.sub(r"([/&\\])", r"\\\1", text)
