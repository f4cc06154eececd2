"""The turn before which a group of forks begins."""

import random
import time
from typing import Any

import pytest

from scheduling.fork_selection import choose_turn
from store.arrays import logprobs_to_bytes, pack_json
from store.forks import ForkableTurn


def turn(number: int, logprobs: list[float], **arguments: Any) -> ForkableTurn:
    call = {"id": "c", "type": "function", "function": {"name": "tool", "arguments": arguments}}
    message = {"role": "assistant", "content": "sed -i says nothing", "tool_calls": [call]} if arguments else {}
    return ForkableTurn(number, 1, False, logprobs_to_bytes(logprobs), pack_json({"message": message}))


LOOK = turn(2, [-0.1, -0.1], command="grep -rn 'a > b' src 2>/dev/null")
EDIT = turn(3, [-0.5] * 40, command="sed -i 's/a/b/' src/a.py")
TEST = turn(4, [-2.0], command="pytest -q 2>&1 | tail")
DONE = turn(5, [-0.2])


def test_entropy_takes_the_lowest_mean_and_first_edit_the_first_that_writes() -> None:
    turns = [LOOK, EDIT, TEST, DONE]
    draw = random.Random(0)
    assert choose_turn(turns, "entropy", draw) is TEST, "the mean counts, not the sum"
    assert choose_turn(turns, "first_edit", draw) is EDIT
    assert choose_turn([LOOK, TEST, DONE], "first_edit", draw) is None


@pytest.mark.parametrize("rule", ["uniform", "mixed"])
def test_any_other_rule_draws_evenly_and_equally_for_equal_seeds(rule: str) -> None:
    turns = [LOOK, EDIT, TEST, DONE]
    found = [choose_turn(turns, rule, random.Random(seed)) for seed in range(400)]
    assert found == [choose_turn(turns, rule, random.Random(seed)) for seed in range(400)]
    assert all(60 < found.count(one) < 140 for one in turns)


@pytest.mark.parametrize("rule", ["uniform", "mixed", "entropy", "first_edit"])
def test_a_rollout_of_one_turn_has_none(rule: str) -> None:
    assert choose_turn([], rule, random.Random(0)) is None


@pytest.mark.parametrize(
    ("arguments", "writes"),
    [
        ({"file_path": "a", "old_string": "x", "new_string": "y"}, True),
        ({"path": "a", "content": ""}, True),
        ({"input": "*** Begin Patch\n*** Update File: a"}, True),
        ({"command": "cat > a.py <<'E'\nx\nE"}, True),
        ({"command": 'echo "x" >> "a"'}, True),
        ({"command": 'python -c \'open("a", "w").write(1)\''}, True),
        ({"command": "git apply fix.diff"}, True),
        ({"command": "cat a.py | head"}, False),
        ({"command": "python -c 'print(open(\"app.py\").read())'"}, False),
        ({"command": "echo done > /dev/null"}, False),
        ({"command": "grep '\"content\":' a.json"}, False),
        ({"path": "a"}, False),
        ({"todos": [{"content": "fix it", "status": "open"}]}, False),
        ({"command": "insert", "path": "a", "insert_line": 3, "insert_text": "x"}, True),
        ({"path": "a", "edits": [{"old_text": "x", "new_text": "y"}]}, True),
        ({"notebook_path": "a", "new_source": "x"}, True),
        ({"pattern": "sed -i", "path": "src"}, False),
    ],
)
def test_calls_that_write_a_file(arguments: dict[str, Any], writes: bool) -> None:
    found = choose_turn([turn(2, [-1.0], **arguments)], "first_edit", random.Random(0))
    assert (found is not None) == writes


@pytest.mark.parametrize(
    ("command", "writes"),
    [
        ("cd src\nsed -i s/a/b/ a.py", True),
        ("sed --in-place s/a/b/ a.py", True),
        ("sed -Ei.bak 's/a/b/' a.py", True),
        ("sed -n '1,20p' a-i.py", False),
        ("set -e\ncat > a.py <<E\nx = 1\nE", True),
        ("cat <<'E' > a.py\nx\nE\npytest", True),
        ("cat <<E | tee a.py\nx\nE", True),
        ("sudo tee a.py <<E\nx\nE", True),
        ("printf x | sudo tee -a a.py", True),
        ("echo x >> 'a b.py'", True),
        ('echo "it\'s" >a.py', True),
        ("cat a.py \\\n  > b.py", True),
        ("patch -p1 < fix.diff", True),
        ("bash -lc 'echo x > a.py'", True),
        ("patch --dry-run -p1 < fix.diff", False),
        ("git apply --check fix.diff", False),
        ("git apply --stat fix.diff", False),
        ("echo a \\> b", False),
        ("grep -c '>' a.py", False),
        ("cd src && patch -p1 <<E\n--- a\nE", True),
        ("perl -pi -e 's/a/b/' a.py", True),
        ("perl -0pi -e 's/a/b/' a.py", True),
        ("perl -MList::Util -e 'print 1'", False),
        ("python - <<E\nopen('a','w').write('x')\nE", True),
        ("python - <<E\nfrom pathlib import Path\nPath('a').write_text('x')\nE", True),
        ("python -c \"open(os.path.join('a', 'b'), mode='wb')\"", True),
        ("python -c \"Path('a').open('w')\"", True),
        ("apply_patch <<'E'\n*** Begin Patch\nE", True),
        ('node -e \'fs.writeFileSync("a", "x")\'', True),
        ("python - <<E\nif 2 > 1:\n    print(open('a').read())\nE", False),
        ("cat <<E\na > b\nE", False),
        ("echo 'x -> y'", False),
        ('echo "a > b"; ls', False),
        ("cat a.py 2>errors", False),
        ("cat a.py 2>>errors", False),
        ("cat a.py >&2", False),
        ("cat a.py >> /dev/null", False),
        ("pytest | tee log", False),
        ("pytest > log 2>&1; cat log", False),
        ("grep -rn 'write_text(' src", False),
        ("grep -rn patch src; git log --patch", False),
        ("git diff > fix.diff", False),
        ("cp fixed.py src/a.py", True),
        ("cd src && cp -r /usr/lib/b . && ls", True),
        ("mv a.py b.py", True),
        ("git mv a.py b.py", True),
        ("{ echo x; cat a.py; } > b.py", True),
        ("(echo x; cat a.py) | sudo tee b.py", True),
        ("for f in *.py; do cat $f; done > all.py", True),
        ("for f in *.py; do cp $f $f.bak; done", True),
        ("if test -f a; then sed -i s/a/b/ a; fi", True),
        ("find . -name '*.py' -exec sed -i s/a/b/ {} +", True),
        ("grep -rl a src | xargs -n 1 sed -i s/a/b/", True),
        ("LC_ALL=C sed -i s/a/b/ a.py", True),
        ("/usr/bin/sed 's/a/b/' a.py > c.py && mv c.py a.py", True),
        ("awk '{print $1}' a > b", True),
        ("sort a | head -3 > b", True),
        ("2>/dev/null sed -i s/a/b/ a.py", True),
        ("tee a.py b.py > /dev/null <<E\nx\nE", True),
        ("cat > a.py <<E\nit's\nE\nls", True),
        ("cat >| a.py <<E\nx\nE", True),
        ("cat <<E >> a.py 2>&1\nx\nE", True),
        ("echo '# Title' > a.md", True),
        ("echo a#b > c", True),
        ("# first\ncp a b", True),
        ("git diff | git apply -R", True),
        ('python3.11 -c \'import pathlib; pathlib.Path("a").write_text("x")\'', True),
        ("python <<'E'\nwith open('a.py', 'a') as f:\n    f.write(\"it's\")\nE", True),
        ("ls > /dev/null; grep -n x a > /dev/null", False),
        ("grep -n 'cp a b' a.py 2>/dev/null | head", False),
        ("{ cat a.py; } 2>/dev/null", False),
        ("(cd src && pytest) > log 2>&1", True),
        ("{ make; ls; } > log", True),
        ("pytest | head -5 > log", True),
        ("cat in | python run.py > log", False),
        ("sed -n 's/a -i b/x/p' a.py", False),
        ("python -c 'print(1 >> 2)'", False),
        ("python a.py <<E\n1 > 2\nE", False),
        ("cat a.py | python -c 'import sys; print(sys.stdin.read())'", False),
        ("bash -c 'ls; cat a.py'", False),
        ('bash -c "echo \\"a > b\\""', False),
        ("echo a  # then > b", False),
        ("# Let's see\nls\ncat > a.py <<'E'\nx\nE", True),
        ("# a -> b\nls", False),
        ("ls  # it's here\nsed -i s/a/b/ a.py", True),
        ("grep -rn unused -i src", False),
        ("head -n 2 > a.py", True),
        ("python -c \"open('a', 'w+').write('x')\"", True),
        ('python -c "open(\\"a\\", \\"wt\\")"', True),
        ("python -c \"print(json.load(open(p, encoding='utf8'))['x'])\"", False),
        ("/bin/cp a b", True),
        ("git log --grep apply; git commit -m 'mv a b'", False),
        ("grep -rn 'git apply\\|sed -i' .", False),
        ("diff <(cat a) <(cat b)", False),
        ("ls # cp a b", False),
    ],
)
def test_commands_that_write_a_file(command: str, writes: bool) -> None:
    for arguments in ({"command": command}, {"cmd": ["bash", "-lc", command]}):
        found = choose_turn([turn(2, [-1.0], **arguments)], "first_edit", random.Random(0))
        assert (found is not None) == writes


@pytest.mark.parametrize("piece", ["open(,", "open(", "python open(", "<<E\n", "sed\n", "'", "# ", "2>", "\\", '"\\'])
def test_a_command_of_any_form_is_read_in_little_time(piece: str) -> None:
    started = time.process_time()
    choose_turn([turn(2, [-1.0], command="python " + piece * 4000)], "first_edit", random.Random(0))
    assert time.process_time() - started < 5, "a fifth of a second is usual"
