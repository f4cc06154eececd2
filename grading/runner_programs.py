"""Find the programs of a repository that a test command runs: by the row's commands, package.json, Makefiles, tox.

A patch that edits such a program decides what the tests are.
"""

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grading.makefiles import test_recipes
from grading.package_scripts import runner_scripts

MAX_PROGRAM_TEXT = 200_000
_SETTINGS = frozenset(
    {
        "package.json",
        "composer.json",
        "Makefile",
        "makefile",
        "GNUmakefile",
        "justfile",
        "Justfile",
        "Taskfile.yml",
        "tox.ini",
    }
)
_INTERPRETERS = frozenset(
    ("bash", "sh", "zsh", "dash", "python", "python2", "python3", "node", "nodejs", "deno", "bun", "tsx", "ts-node",
     "ruby", "php", "perl", "lua", "Rscript", "source", ".", "exec", "xvfb-run", "babel-node", "electron", "run",
     "command", "env")
)  # fmt: skip
_LOADING_OPTIONS = frozenset(
    ("-r", "--require", "--import", "--loader", "--config", "-c", "--setup", "--bootstrap", "--init-file")
)
_SEPARATORS = re.compile(r"\|\||&&|[;&|()\n`]|\$\(")
_WORD = re.compile(r"[^\s\"']+")
_TEST_NAME = re.compile(r"test|spec|check|(?:^|/)ci\b|runner|verify", re.IGNORECASE)


@dataclass(slots=True, frozen=True)
class RunnerPrograms:
    """Paths of programs, from the repository's root; a suffix may be left out, and a directory stands for its files."""

    paths: frozenset[str]

    def starts(self, path: str) -> bool:
        directory, _, name = path.rpartition("/")
        stem = f"{directory}/{name.rpartition('.')[0]}".lstrip("/") if "." in name else path
        is_main = name.partition(".")[0] in ("index", "__main__")
        return path in self.paths or stem in self.paths or (is_main and directory in self.paths)


def has_test_commands(path: str) -> bool:
    """Return whether the file's name is that of a file with commands of test runs."""
    return path.rpartition("/")[2] in _SETTINGS


def find_programs(settings: Mapping[str, str], commands: Iterable[str]) -> RunnerPrograms:
    """Return the programs that the row's commands and the test scripts of settings files start."""
    found: set[str] = set()
    for path, text in settings.items():
        directory = path.rpartition("/")[0]
        found |= {_resolved(directory, name) for name in _started(_runner_text(path, text))}
    for command in commands:
        # A row's command may start the product itself, which a patch has to edit.
        found |= {_resolved("", name) for name in _started(command) if name.endswith(".sh") or _TEST_NAME.search(name)}
    return RunnerPrograms(frozenset(found - {""}))


def _runner_text(path: str, text: str) -> str:
    name = path.rpartition("/")[2]
    if name.endswith("akefile"):
        return test_recipes(text)
    if name not in _SETTINGS:
        return ""
    if not name.endswith(".json"):
        return text
    try:
        found = runner_scripts(json.loads(text).get("scripts"))
    except (ValueError, AttributeError, RecursionError, MemoryError):
        return ""
    return "\n".join(found.values())


def _resolved(directory: str, name: str) -> str:
    path = re.sub(r"^(?:\$\{?PWD\}?/|\$\(CURDIR\)/)", "", name)
    return posixpath.normpath(posixpath.join(directory, path)).removeprefix("./") if path else ""


def _started(text: str) -> Iterable[str]:
    """Yield the words of a shell text that name a program or a file that it loads: the first word of a command, the
    first argument of an interpreter, and the value of an option that loads a file."""
    for command in _SEPARATORS.split(text[:MAX_PROGRAM_TEXT]):
        words = _WORD.findall(command.strip().lstrip("@-"))
        while words and re.fullmatch(r"\w+=.*", words[0]):
            del words[0]
        expected = True
        for at, word in enumerate(words):
            option, _, value = word.partition("=")
            if option in _LOADING_OPTIONS:
                yield value or (words[at + 1] if at + 1 < len(words) else "")
            elif word == "-m" and at + 1 < len(words):
                yield words[at + 1].replace(".", "/")
                expected = False
            elif expected and not word.startswith("-"):
                is_interpreter = word in _INTERPRETERS or (word[0] == "/" and word.rpartition("/")[2] in _INTERPRETERS)
                expected = is_interpreter
                if not is_interpreter and ("/" in word or "." in word):
                    yield word
