"""The scripted policy of the benchmark of replay: commands of a coding agent, drawn by a seed, and an engine
that gives them in the form of each agent program's own tools.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WORKDIR = "/workspace/repo"
_COMMIT = "git -c user.name=agent -c user.email=agent@example.invalid commit"
_FILES = {
    "calc/__init__.py": "from calc.core import add, mean, scale\n",
    "calc/core.py": (
        "import time\n\n\ndef add(a, b):\n    return a - b\n\n\ndef scale(values, factor=2):\n"
        "    return [one * factor for one in values]\n\n\ndef mean(values):\n    time.sleep(0.01)\n"
        "    return sum(values) / len(values)\n"
    ),
    "calc/cli.py": (
        "import sys\n\nfrom calc import add\n\nif __name__ == '__main__':\n    print(add(*map(int, sys.argv[1:])))\n"
    ),
    "tests/test_core.py": (
        "from calc import add, mean, scale\n\n\ndef test_add():\n    assert add(2, 3) == 5\n\n\ndef test_scale():\n"
        "    assert scale([1, 2]) == [2, 4]\n\n\ndef test_mean(tmp_path):\n    assert mean([1, 2, 3]) == 2\n"
    ),
    "conftest.py": "",
    "README.md": "# calc\n\nSmall functions for numbers. `python3 -m calc.cli 2 3` adds.\n",
    "setup.py": "from setuptools import setup\n\nsetup(name='calc', version='0.1', packages=['calc'])\n",
}
FIX = "sed 's/a - b/a + b/' calc/core.py >fixed && mv fixed calc/core.py"
TASK = {
    "image": "host",
    "workdir": WORKDIR,
    "problem_statement": "add() in calc/core.py subtracts.",
    "pre_commands": [
        "export GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z\n"
        "git init -q . && mkdir -p calc tests && "
        + "".join(f"cat > {path} <<'END_OF_FILE'\n{text}END_OF_FILE\n" for path, text in _FILES.items())
        + f"git add -A && {_COMMIT} -qm 'Add calc' && echo >> README.md && {_COMMIT} -qam 'Add a line'"
    ],
    "eval_cmd": "python3 -c 'from calc import add; assert add(2, 3) == 5'",
    "empty_patch_fails": True,
}
COMMANDS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "read": (
        40,
        (
            "cat calc/core.py",
            "sed -n '1,40p' calc/core.py",
            "grep -rn 'def ' calc tests",
            "find . -name '*.py' -not -path './.git/*' | sort",
            "head -20 README.md; wc -l calc/*.py",
            "find . -type f -not -path './.git/*'",
            "python3 -m calc.cli 2 3",
        ),
    ),
    "list": (
        12,
        (
            "ls -l",
            "ls -la calc tests",
            "ls -lt calc",
            "ls -la --time-style=full-iso",
            "stat calc/core.py",
            "find calc -name '*.py' -printf '%TY-%Tm-%Td %TH:%TM %p\\n'",
            "du -sh . && du -a calc | sort -n | tail -3",
        ),
    ),
    "test": (
        22,
        (
            "pytest -q",
            "pytest --durations=3",
            "pytest -x -v tests/test_core.py 2>&1 | tail -25",
            "pytest -q -k 'add or mean' --durations=0",
            "time python3 -m unittest discover -s tests",
            "pytest -q --junitxml=/tmp/report.xml; head -c 400 /tmp/report.xml",
        ),
    ),
    "git": (
        12,
        (
            "git status",
            "git log --oneline -5",
            "git log -2 --stat",
            "git diff",
            "git show --stat HEAD",
            f"git add -A && {_COMMIT} -m 'Mend add' ; git log -1",
            "echo '# note' >> README.md && git stash && git stash list && git stash pop",
            "git rev-parse HEAD && git describe --always && git branch -v",
            "git blame -L 1,6 calc/core.py",
            "git reflog | head -5; git log --graph --oneline | head",
            "git format-patch -1 --stdout | head -20",
        ),
    ),
    "pip": (
        3,
        (
            "pip --version",
            "pip list 2>/dev/null | head -5",
            "pip show setuptools | head -3",
            "pip install -e . --no-deps --no-build-isolation --break-system-packages --user 2>&1 | tail -4",
            "pip wheel . --no-deps --no-build-isolation -w /tmp/wheels 2>&1 | tail -6",
        ),
    ),
    "temporary": (
        3,
        (
            "mktemp",
            "d=$(mktemp -d) && cp -r calc $d && ls $d && echo $d",
            "python3 -c 'import tempfile; print(tempfile.mkdtemp())'",
            'python3 -c \'import tempfile; print(tempfile.NamedTemporaryFile(suffix=".py", prefix="case_").name)\'',
        ),
    ),
    "background": (
        3,
        (
            "python3 -m http.server 8123 >/tmp/server.log 2>&1 & echo started $!",
            "sleep 60 & jobs -l; kill %1",
            "(sleep 0.3; echo done > /tmp/background.txt) & wait; cat /tmp/background.txt",
            "nohup python3 -u -m http.server 0 > /tmp/any.log 2>&1 & sleep 1; cat /tmp/any.log; kill $!",
            "sleep 60 >/dev/null 2>&1 & echo $!",
            "sleep 61 >/dev/null 2>&1 & ps aux | grep '[s]leep 61'",
            "sleep 62 >/dev/null 2>&1 & ps -ef | grep '[s]leep 62'; pgrep -f 'sleep 62'",
        ),
    ),
    "clock": (
        2,
        (
            "date",
            "date -u +%Y-%m-%dT%H:%M:%SZ; date +%s",
            "python3 -m timeit -n 2000 'sum(range(100))'",
            "time python3 -c 'import calc; print(calc.mean([1, 2]))'",
            'python3 -c \'import logging; logging.basicConfig(format="%(asctime)s %(message)s"); logging.error("x")\'',
        ),
    ),
    "python": (
        3,
        (
            "python3 -c 'from calc import add; print(add, object())'",
            'python3 -c \'print({"alpha", "beta", "gamma"})\'',
            "python3 -c 'from calc import mean; mean([])'",
            "python3 -c 'import os, socket; print(os.getcwd(), socket.gethostname(), os.environ[\"HOME\"])'",
        ),
    ),
}
"""Family -> weight among a rollout's commands, and the commands."""


@dataclass(frozen=True)
class Program:
    """An agent program. `fetch`: its name for `ratchet admin agents fetch`, empty if it needs none. `tool`: its shell
    tool and that tool's argument. `last`: what ends its work. `own`: calls of its other tools, by family."""

    harness: str
    fetch: str
    tool: str
    argument: str
    last: tuple[str, ...] = ("Fixed.",)
    own: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()
    takes_several: bool = True


def _in(path: str) -> str:
    return f"{WORKDIR}/{path}"


_PATCH = "*** Begin Patch\n*** Add File: scratch.py\n+print(1)\n*** End Patch"
PROGRAMS = (
    Program("bash_agent", "", "bash", "command"),
    Program(
        "mini_swe_agent",
        "mini-swe-agent",
        "bash",
        "command",
        ("$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",),
        takes_several=False,
    ),
    Program(
        "claude_code",
        "claude-code",
        "Bash",
        "command",
        own=(
            ("own read", "Read", {"file_path": _in("calc/core.py")}),
            ("own read", "Read", {"file_path": _in("tests/test_core.py"), "offset": 1, "limit": 5}),
            (
                "own edit",
                "Write",
                {"file_path": _in("scratch.py"), "content": "from calc import add\n\nprint(add(2, 3))\n"},
            ),
            ("own background", "Bash", {"command": "sleep 1; echo done", "run_in_background": True}),
        ),
    ),
    Program(
        "codex",
        "codex",
        "exec_command",
        "cmd",
        own=(
            ("own edit", "exec_command", {"cmd": f"apply_patch <<'EOF'\n{_PATCH}\nEOF"}),
            ("own background", "exec_command", {"cmd": "sleep 20; echo done", "yield_time_ms": 300}),
        ),
    ),
    Program(
        "opencode",
        "opencode",
        "bash",
        "command",
        own=(
            ("own read", "read", {"filePath": _in("calc/core.py")}),
            ("own search", "grep", {"pattern": "def "}),
            ("own search", "glob", {"pattern": "**/*.py"}),
            ("own edit", "write", {"filePath": _in("scratch.py"), "content": "print(1)\n"}),
        ),
    ),
    Program(
        "qwen_code",
        "qwen-code",
        "run_shell_command",
        "command",
        own=(
            ("own read", "read_file", {"file_path": _in("calc/core.py")}),
            ("own search", "grep_search", {"pattern": "def "}),
            ("own search", "glob", {"pattern": "**/*.py"}),
            ("own edit", "write_file", {"file_path": _in("scratch.py"), "content": "print(1)\n"}),
            ("own background", "run_shell_command", {"command": "sleep 20; echo done", "is_background": True}),
        ),
    ),
)


class Call(NamedTuple):
    """One call of a tool. `family`: of the command, under which a divergence by its result is counted."""

    family: str
    tool: str
    arguments: Mapping[str, Any]

    @property
    def text(self) -> str:
        values = "".join(
            f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for name, value in self.arguments.items()
        )
        return f"<tool_call>\n<function={self.tool}>\n{values}</function>\n</tool_call>"

    @property
    def words(self) -> str:
        return next((value for value in self.arguments.values() if isinstance(value, str)), self.tool)


@dataclass
class Case:
    """One rollout: the calls of each turn. Its first box is lost while the model is asked for the turn behind them.

    `asked_at`: seconds since the epoch of each attempt's calls of the engine.
    """

    program: Program
    number: int
    turns: list[list[Call]]
    asked_at: dict[int, list[float]] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def label(self) -> str:
        """The label of its task."""
        return f"{self.program.harness}-{self.number}"

    def text(self, number: int) -> str:
        """Return the answer of the turn `number`."""
        if number < len(self.turns):
            return "\n".join(one.text for one in self.turns[number])
        last = self.program.last[min(number - len(self.turns), len(self.program.last) - 1)]
        if last.startswith("$ "):
            return self._shell("last", last.removeprefix("$ ")).text
        return last

    def _shell(self, family: str, command: str) -> Call:
        more = {"description": "run a command"} if self.program.harness in ("claude_code", "opencode") else {}
        more = {"is_background": False} if self.program.harness == "qwen_code" else more
        return Call(family, self.program.tool, {self.program.argument: command, **more})

    def draw(self, rng: random.Random, num_turns: int, several_share: float) -> None:
        fix_at = rng.randrange(num_turns)
        for at in range(num_turns):
            count = 2 if self.program.takes_several and rng.random() < several_share else 1
            turn = [self._one(rng) for _ in range(count)]
            self.turns.append([self._shell("edit", FIX)] if at == fix_at else turn)

    def _one(self, rng: random.Random) -> Call:
        own = self.program.own
        if own and rng.random() < 0.3:
            return Call(*rng.choice(own))
        family = rng.choices(list(COMMANDS), [weight for weight, _ in COMMANDS.values()])[0]
        return self._shell(family, rng.choice(COMMANDS[family][1]))


def make_case(program: Program, number: int, seed: int, most_turns: int) -> Case:
    rng = random.Random(f"{seed}/{program.harness}/{number}")
    case = Case(program, number, [])
    case.draw(rng, rng.randint(2, most_turns), several_share=0.15)
    return case
