"""Small Harbor tasks as people write them, with the rewards that Harbor's own verifier gives.

The rewards are those of the package `harbor` 0.26.0: its verifier, on a repository as its agents `oracle` and `nop` and
a wrong solution leave it. A name stands for the error that it raises in place of a reward.
"""

from dataclasses import dataclass, field
from pathlib import Path

PYTHON = "/opt/ratchet/bin/python3"
PYTEST = f"{PYTHON} -B -m pytest -q -p no:cacheprovider"
NO_FILE, EMPTY, UNREADABLE = "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError"
NOTHING_RAN = "no verdict here, although Harbor gives one"


@dataclass(frozen=True)
class HarborTask:
    """`wrong`: a script that changes something and solves nothing. `rewards`: of oracle, nop and wrong."""

    script: str
    solution: str
    wrong: str
    rewards: tuple[dict[str, float] | str, dict[str, float] | str, dict[str, float] | str]
    tests: dict[str, str] = field(default_factory=dict)
    toml: str = ""

    def write(self, directory: Path) -> Path:
        """Write the directory of the task."""
        files = {
            "instruction.md": "Do it.\n",
            "task.toml": '[environment]\ndocker_image = "host"\nworkdir = "/app"\n' + self.toml,
            "tests/test.sh": self.script,
            "solution/solve.sh": self.solution,
            **{f"tests/{name}": text for name, text in self.tests.items()},
        }
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        return directory


ONE, ZERO = {"reward": 1.0}, {"reward": 0.0}
_HELLO_TEST = """from pathlib import Path


def test_hello():
    assert Path("/app/hello.txt").read_text().strip() == "Hello, world!"
"""
_HELLO = "#!/bin/bash\necho 'Hello, world!' > hello.txt\n"
_WRONG_HELLO = "echo 'Bye' > hello.txt\n"
_BY_EXIT_CODE = f"""#!/bin/bash
if {PYTEST} /tests/test_outputs.py -rA; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
_SHARE = """#!/bin/sh
n=0
for name in a b c d; do [ "$(cat $name 2>/dev/null)" = "$name" ] && n=$((n + 1)); done
echo "$n" | awk '{ printf "{\\"reward\\": %.2f, \\"found\\": %d}", $1 / 4, $1 }' > /logs/verifier/reward.json
"""
_BY_PYTHON = f"""#!{PYTHON}
import json, os, pathlib
text = pathlib.Path("out.txt").read_text() if os.path.exists("out.txt") else ""
right, neat = text.strip() == os.environ["WANTED"], text.endswith("\\n")
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({{"right": right, "neat": float(neat)}}))
"""

TASKS = {
    "hello": HarborTask(_BY_EXIT_CODE, _HELLO, _WRONG_HELLO, (ONE, ZERO, ZERO), {"test_outputs.py": _HELLO_TEST}),
    "the exit code means nothing": HarborTask(
        _BY_EXIT_CODE + "exit 3\n", _HELLO, _WRONG_HELLO, (ONE, ZERO, ZERO), {"test_outputs.py": _HELLO_TEST}
    ),
    "a fraction and a count": HarborTask(
        _SHARE,
        "for name in a b c d; do echo $name > $name; done\n",
        "echo a > a; echo c > b; echo c > c\n",
        ({"reward": 1.0, "found": 4}, {"reward": 0.0, "found": 0}, {"reward": 0.5, "found": 2}),
    ),
    "several keys by a script in Python": HarborTask(
        _BY_PYTHON,
        "printf '%s\\n' \"$ANSWER\" > out.txt\n",
        "printf 42 > out.txt\n",
        ({"right": 1.0, "neat": 1.0}, {"right": 0.0, "neat": 0.0}, {"right": 1.0, "neat": 0.0}),
        toml='[verifier]\nenv = { WANTED = "42" }\n[solution]\nenv = { ANSWER = "42" }\n',
    ),
    "no reward file without a success": HarborTask(
        "[ -f done ] && echo 1 > /logs/verifier/reward.txt\nexit 0\n",
        "touch done\n",
        "touch don\n",
        (ONE, NO_FILE, NO_FILE),
    ),
    "an empty file": HarborTask(
        "touch /logs/verifier/reward.txt; [ -f done ] && echo ' 1.0 ' > /logs/verifier/reward.txt\n",
        "touch done\n",
        "touch don\n",
        (ONE, EMPTY, EMPTY),
    ),
    "words": HarborTask(
        "if [ -f done ]; then r=1; else r=failed; fi; echo $r > /logs/verifier/reward.txt\n",
        "touch done\n",
        "touch don\n",
        (ONE, UNREADABLE, UNREADABLE),
    ),
    "a validator of a file of answers": HarborTask(
        f"mkdir -p /logs/verifier\nif {PYTHON} /tests/validate.py answers.json; then\n"
        "  echo 1 > /logs/verifier/reward.txt\nelse\n  echo 0 > /logs/verifier/reward.txt\nfi\n",
        'echo \'{"readme": "r"}\' > answers.json\n',
        'echo \'{"readme": "r", "other": 1}\' > answers.json\n',
        (ONE, ZERO, ZERO),
        {"validate.py": "import json, sys\nsys.exit(set(json.load(open(sys.argv[1]))) != {'readme'})\n"},
    ),
    "both files": HarborTask(
        "echo 1 > /logs/verifier/reward.txt; [ -f done ] && r=1 || r=0\n"
        'echo "{\\"score\\": $r}" > /logs/verifier/reward.json\n',
        "touch done\n",
        "touch don\n",
        ({"score": 1.0}, {"score": 0.0}, {"score": 0.0}),
    ),
    "a variable of the environment, a helper of the tests": HarborTask(
        '. /tests/lib/check.sh; check "$LEVEL" > /logs/verifier/reward.txt; echo x > /logs/artifacts/x\n',
        'echo "$LEVEL" > level\n',
        "echo 0 > level\n",
        (ONE, ZERO, ZERO),
        {"lib/check.sh": 'check() { [ "$(cat level 2>/dev/null)" = "$1" ] && echo 1 || echo 0; }\n'},
        toml='env = { LEVEL = "3 of 4" }\n',
    ),
    "root, with pytest": HarborTask(
        'set -e; test "$(id -u) $HOME" = "0 /root"; install -m 600 /dev/null "$HOME/of-root"; git status\nset +e\n'
        + _BY_EXIT_CODE,
        _HELLO,
        _WRONG_HELLO,
        (ONE, ZERO, ZERO),
        {"test_outputs.py": _HELLO_TEST},
        toml='[verifier]\nuser = "root"\n',
    ),
    "root, whose processes try to write the reward later": HarborTask(
        "late='sleep 1; rm /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json'\n"
        'setsid sh -c "$late" & (nohup setsid -f sh -c "trap : TERM HUP; $late" &)\n'
        "[ -f done ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n",
        "touch done\n",
        "touch don\n",
        (ONE, ZERO, ZERO),
        toml="[verifier]\nuser = 0\n",
    ),
    "root, without the network from which it installs": HarborTask(
        "apt-get install -y no-such-package-here && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
        "[ ! -f done ] || echo '1 passed in 0.1s'; echo 1 > /logs/verifier/reward.txt\n",
        "touch done\n",
        "touch don\n",
        (ONE, NOTHING_RAN, NOTHING_RAN),
        toml='network_mode = "no-network"\n[verifier]\nuser = "root"\n',
    ),
    "a user of the image": HarborTask(
        'test "$(id -un) $USER" = "nobody nobody" || exit 1; touch of-nobody && git status || exit 1\n'
        "[ -f done ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n",
        "touch done\n",
        "touch don\n",
        (ONE, ZERO, ZERO),
        toml='[verifier]\nuser = "nobody"\n',
    ),
}
