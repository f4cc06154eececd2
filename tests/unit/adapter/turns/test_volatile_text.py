"""Texts that differ in what changes each time become equal; texts that differ in anything else do not."""

import random
import time

import orjson
import pytest

from adapter.turns.volatile_text import names_any, volatile_words, without_volatile

SLOWEST = "============ slowest durations =============\n"
HIDDEN = "\n({} durations < 0.005s hidden.  Use -vv to show these durations.)\n3 passed in 0.12s"
FAULTS = "{}inputs+0outputs (0major+{}minor)pagefaults 0swaps"
VOLATILE = [
    (
        f"0.04user 0.00system 0:00.04elapsed 95%CPU (0avgtext+0avgdata 12904maxresident)k\n{FAULTS.format(0, 2014)}",
        f"1.03user 0.01system 1:00.23elapsed ?%CPU (0avgtext+0avgdata 13130maxresident)k\n{FAULTS.format(8, 2016)}",
    ),
    (
        "The worst time (2.1 usec) was more than four times slower than the best time (426 nsec).",
        "The worst time (9 usec) was more than four times slower than the best time (1.5 usec).",
    ),
    ("listening on port 32777", "listening on port 32801"),
    ("-rw-r--r-- 1 agent agent 12 Nov 29 10:00 calc.py", "-rw-r--r-- 1 agent agent 12 Dec  1 09:13 calc.py"),
    ("-rw-r--r-- 1 a a 12 Jan  3  2025 calc.py", "-rw-r--r-- 1 a a 12 Jan 13  2026 calc.py"),
    ("Sat Nov 29 15:00:43 UTC 2026", "Sun Nov  1 05:10:43 UTC 2026"),
    ("Date:   Sun Nov 29 15:00:43 2026 +0000", "Date:   Mon Nov 30 08:00:00 2026 +0000"),
    ("2026-11-29T15:00:43.123Z started", "2026-12-01T00:10:43.9Z started"),
    ("2026-11-29 15:00:43,123 INFO ready", "2026-11-30 15:00:44,001 INFO ready"),
    ("3 passed, 1 failed in 0.12s", "3 passed, 1 failed in 11.02s"),
    (
        f"{SLOWEST}0.02s call     a.py::test_add\n0.01s setup    b.py::test_mean\n{HIDDEN.format(4)}",
        f"{SLOWEST}0.03s call     b.py::test_mean\n{HIDDEN.format(5)}",
    ),
    (
        f"{SLOWEST}{HIDDEN.format(6)}",
        f"{SLOWEST}0.03s call     b.py::test_mean\n0.01s teardown b.py::test_mean\n3 passed in 0.04s",
    ),
    ("Ran 3 tests in 0.001s", "Ran 3 tests in 0.010s"),
    ("real\t0m0.012s", "real\t1m2.500s"),
    ("took 15.5 ms", "took 9.25 ms"),
    ("built in 15 ms", "built in 9 ms"),
    ("/tmp/tmp.Xa81mPq2oL/out", "/tmp/tmp.0kU3kk2Lmn/out"),
    ("/tmp/tmpab12cd_x", "/tmp/tmpzz99qq_0"),
    ("/tmp/pytest-of-agent/pytest-3/x", "/tmp/pytest-of-agent/pytest-12/x"),
    ("[1] 4711", "[1] 523"),
    ("listening, pid 312", "listening, pid 99123"),
    ("commit 1f0c0ffee1f0c0ffee1f0c0ffee1f0c0ffee1234", "commit aaaaaffee1f0c0ffee1f0c0ffee1f0c0ffee1234"),
    ("[main 1a2b3c4] Mend it", "[main 99ffee1] Mend it"),
    ("[main (root-commit) 1a2b3c4] Add", "[main (root-commit) 0000aaa] Add"),
    ("1a2b3c4 Mend it", "99ffee1 Mend it"),
    ("<object at 0x7f3ecacf1b90>", "<object at 0x7faaaaaa0010>"),
    ("http://localhost:41080/ ready", "http://localhost:40123/ ready"),
    (
        "Serving HTTP on 0.0.0.0 port 43121 (http://0.0.0.0:43121/)",
        "Serving HTTP on 0.0.0.0 port 33009 (http://0.0.0.0:33009/)",
    ),
    ("/tmp/4513bc4f-0311-4b63-9e57-9dcbca959e75/a", "/tmp/7b354561-46fa-4939-ae49-a55b1ab6a968/a"),
    ("2000 loops, best of 5: 1.2 usec per loop", "2000 loops, best of 5: 900 nsec per loop"),
    ('<testsuite tests="1" time="0.243"/>', '<testsuite tests="1" time="1.283"/>'),
    ("# duration_ms 1.25", "# duration_ms 12.5"),
    ("[1]+ 171 Running                 sleep 60 &", "[1]+  4110 Running                 sleep 60 &"),
    (
        "agent        171  0.0  0.0   5480   900 ?        S    10:00   0:00 sleep 61",
        "agent       4110  0.3  0.1   5484  1032 ?        S    11:30   0:00 sleep 61",
    ),
    ("agent 171 1 0 10:00 ? 00:00:00 sleep 62", "agent    4110  300  2 11:30 ? 00:00:01 sleep 62"),
    ("Device: 7,0\tInode: 8811        Links: 1", "Device: 7,12\tInode: 12        Links: 1"),
    (
        "Dropped refs/stash@{0} (1f0c0ffee1f0c0ffee1f0c0ffee1f0c0ffee1234)",
        "Dropped refs/stash@{0} (aaaaaffee1f0c0ffee1f0c0ffee1f0c0ffee1234)",
    ),
    (
        "From 1f0c0ffee1f0c0ffee1f0c0ffee1f0c0ffee1234 Mon Sep 17 00:00:00 2001",
        "From aaaaaffee1f0c0ffee1f0c0ffee1f0c0ffee1234 Mon Sep 17 00:00:00 2001",
    ),
    ("* 1a2b3c4 Mend it", "* 99ffee1 Mend it"),
    ("Chunk ID: 89840d\nWall time: 0.0512 seconds", "Chunk ID: 2ed15c\nWall time: 1.2000 seconds"),
    (
        "Process running with session ID 18017\nOriginal token count: 0\nOutput:",
        "Process running with session ID 7277\nOriginal token count: 0\nOutput:",
    ),
    (
        "Command running in background with ID: baejjo4or. Output is being written to: /tmp/a/tasks/baejjo4or.output",
        "Command running in background with ID: bp4i301dr. Output is being written to: /tmp/a/tasks/bp4i301dr.output",
    ),
    (
        "id: bg_0c210b66\npid: 292\noutput file: /a/shell-bg_0c210b66.output",
        "id: bg_da47e190\npid: 318\noutput file: /a/shell-bg_da47e190.output",
    ),
    ("<task-id>baejjo4or</task-id>", "<task-id>bp4i301dr</task-id>"),
    ("Original token count: 107\nOutput:\n1", "Original token count: 108\nOutput:\n1"),
]
DIFFERENT = [
    (
        f"0.04user 0.00system 0:00.04elapsed 95%CPU (0avgtext+0avgdata 12904maxresident)k\n{FAULTS.format(0, 2014)}",
        f"0.04user 0.00system 0:00.04elapsed 95%CPU (0avgtext+0avgdata 912904maxresident)k\n{FAULTS.format(0, 2014)}",
    ),
    (
        "0.04user 0.00system 0:00.04elapsed 95%CPU (0avgtext+0avgdata 12904maxresident)k\n"
        "0inputs+0outputs (0major+2014minor)pagefaults 0swaps",
        "0.04user 0.00system 0:00.04elapsed 95%CPU (0avgtext+0avgdata 12904maxresident)k\n"
        "0inputs+2097152outputs (0major+2014minor)pagefaults 0swaps",
    ),
    (FAULTS.format(0, 2014), FAULTS.format(8, 2014)),
    ("the best time (426)", "the best time (427)"),
    ("The worst time (4.5 s) is at node A", "The worst time (90 s) is at node A"),
    ("slower than the best time (5 s)", "slower than the best time (7 s)"),
    ("OverflowError: port 32768", "OverflowError: port 40000"),
    ("port 60999", "port 61000"),
    ("parent PGID: 4242\nchild PGID: 4242", "parent PGID: 4242\nchild PGID: 4250"),
    (
        f"{SLOWEST}0.02s call     a.py::test_add\n1 passed in 0.1s",
        f"{SLOWEST}0.02s call     a.py::test_add\n2 passed in 0.1s",
    ),
    ("0.02s call of the API\n", "0.02s called off\n"),
    ("0.5s call a\n", "0.5s call b\n"),
    ("connected to localhost:5432", "connected to localhost:6379"),
    ("3e2b7f1a  data.bin", "deadbee0  data.bin"),
    ("fault at 0x000000000000", "fault at 0xffffffffffff"),
    ("took 1.5 s", "took 1.5 ms"),
    (
        "b3f1c2d4-1111-4222-8333-0123456789ab b3f1c2d4-1111-4222-8333-0123456789ab",
        "b3f1c2d4-1111-4222-8333-0123456789ab b3f1c2d4-1111-4222-8333-0123456789ac",
    ),
    ("root  12  0.0  0.1 100 200 pts/0 T 10:00 0:00 x", "root  12  0.0  0.1 100 200 pts/0 R 10:00 0:00 x"),
    ("3 passed in 0.12s", "2 passed in 0.12s"),
    ("-rw-r--r-- 1 a a 12 Nov 29 10:00 calc.py", "-rw-r--r-- 1 a a 13 Nov 29 10:00 calc.py"),
    ("-rw-r--r-- 1 a a 12 Nov 29 10:00 calc.py", "-rwxr--r-- 1 a a 12 Nov 29 10:00 calc.py"),
    ("d41d8cd98f00b204e9800998ecf8427e  a.txt", "0cc175b9c0f1b6a831c399e269772661  a.txt"),
    ("index 1a2b3c4..99ffee1 100644", "index 1a2b3c4..0000000 100644"),
    ("version 1.2.3", "version 1.2.4"),
    ("exit code 1", "exit code 2"),
    ("x = 30", "x = 31"),
    ("/tmp/data/one", "/tmp/data/two"),
    ("line 12, in f", "line 13, in f"),
    ("port 80", "port 81"),
    ("0.1", "0.2"),
    ("May be 1", "May be 2"),
    ("pid", "ppid"),
    ("[1] 42", "[1] 17"),
    ("name 'tmp_result' is not defined", "name 'tmp_buffer' is not defined"),
    ("-rw-r--r-- 1 a a 12 Nov 29 10:00 2023", "-rw-r--r-- 1 a a 12 Nov 29 10:00 2024"),
    ("timeout: 30s", "timeout: 31s"),
    ("mode 0x000001", "mode 0xffffff"),
    ("[main 1a2b3c4] Mend it", "[dev 1a2b3c4] Mend it"),
    ("1234567 bytes", "1234568 bytes"),
    ("on port 8000", "on port 8001"),
    ("Chunk ID: 89840d1", "Chunk ID: 2ed15c1"),
    ("Device: 7,0 Inode: 8811", "Device: 7,1 Inode: 8811"),
    ("id: 0c210b66", "id: da47e190"),
    ("with session ID 4711", "with session ID 4712"),
    ("Original token count: 107", "Original token count: 108"),
    ("/src/tasks/dashboard.py", "/src/tasks/beginning.py"),
    ("[1]  1984 George Orwell", "[1]  1949 George Orwell"),
    ("row  12  0.5  0.7  12  13  kg  Total ", "row  12  0.5  0.8  12  13  kg  Total "),
    ("classes 09:00 10:30 room", "classes 09:00 10:45 room"),
    ('{"duration": 0.5}', '{"duration": 0.6}'),
    ("4513bc4f-0311-1b63-9e57-9dcbca959e75", "7b354561-46fa-1939-ae49-a55b1ab6a968"),
    ("time 0.243", "time 1.283"),
    ("[1]+ 171 Running  sleep 60 &", "[1]+ 171 Done  sleep 60 &"),
    (
        "agent        171  0.0  0.0   5480   900 ?        S    10:00   0:00 sleep 61",
        "agent        171  0.0  0.0   5480   900 ?        S    10:00   0:00 sleep 62",
    ),
    (
        "agent        171  0.0  0.0   5480   900 ?        S    10:00   0:00 sleep 61",
        "root         171  0.0  0.0   5480   900 ?        S    10:00   0:00 sleep 61",
    ),
    ("171 0.5 0.7 12 13", "171 0.5 0.8 12 13"),
    ("(1f0c0ffee1f0c0ffee1f0c0ffee1f0c0ffee1234) a", "(aaaaaffee1f0c0ffee1f0c0ffee1f0c0ffee1234) a"),
    ("2000 loops, best of 5", "2000 loops, best of 3"),
    ("5 s per loop", "5 m per loop"),
]

PROFILE = """   Ordered by: internal time

   ncalls  tottime  percall  cumtime  percall filename:lineno(function)
"""
SERVER = "python3 -m http.server 8123 & echo started $!"
COUNTED = "sleep 60 & echo $!; wc -l < calc.py"
OF_COMMANDS = [
    (
        "pip wheel . --no-deps -w /tmp/wheels",
        f"  Created wheel for calc: filename=calc-0.1-py3-none-any.whl size=1437 sha256={'5f0a' * 16}\n"
        "  Stored in directory: /tmp/pip-ephem-wheel-cache-2k9x_1ab/wheels/5f/0a",
        f"  Created wheel for calc: filename=calc-0.1-py3-none-any.whl size=1441 sha256={'b1c2' * 16}\n"
        "  Stored in directory: /tmp/pip-ephem-wheel-cache-zz00aa_q/wheels/5f/0a",
    ),
    ("python3 -m timeit 'f()'", "1000 loops, best of 5: 203 usec per loop", "2000 loops, best of 5: 187 usec per loop"),
    (
        "python3 -m timeit -n 2000 'f()'",
        "2000 loops, best of 5: 405 nsec per loop",
        "2000 loops, best of 5: 411 nsec per loop",
    ),
    (
        "ipython -c '%timeit f()'",
        "203 µs ± 4.1 µs per loop (mean ± std. dev. of 7 runs, 1,000 loops each)",
        "1.02 ms ± 12 µs per loop (mean ± std. dev. of 7 runs, 10,000 loops each)",
    ),
    (SERVER, "started 17", "started 4123"),
    (
        "curl -si localhost:8123",
        "HTTP/1.0 200 OK\nDate: Tue, 01 Dec 2026 09:13:42 GMT\nContent-Length: 12",
        "HTTP/1.0 200 OK\nDate: Mon, 30 Nov 2026 23:59:58 GMT\nContent-Length: 12",
    ),
    ("cp -r . /tmp/copy; date +%s", "1796112822", "1796099999"),
    ("date -u +%Y-%m-%dT%H:%M:%SZ; date +%s", "2026-11-30T15:00:43Z\n1796140746", "2026-12-01T15:00:43Z\n1796140811"),
    (
        "cat server.log",
        "INFO:     Started server process [17]\n[2026-12-01 09:13:42 +0000] Booting worker with pid: 17",
        "INFO:     Started server process [523]\n[2026-12-01 10:02:01 +0000] Booting worker with pid: 523",
    ),
    ("sleep 60 >/dev/null 2>&1 & sleep 1; pgrep -f 'sleep 60'", "17\n18", "23\n24"),
    ("cd calc && grep -n -r 'def ' .", "b.py:1:def b():\na.py:1:def a():", "a.py:1:def a():\nb.py:1:def b():"),
    ("find . -name '*.py'", "./b.py\n./a/c.py", "./a/c.py\n./b.py"),
    ("git rev-parse HEAD", "1f0c" * 10, "aaa0" * 10),
]
OTHERS_OF_COMMANDS = [
    (
        "pip wheel . --no-deps",
        f"  Created wheel for calc: filename=calc-0.1-py3-none-any.whl size=1437 sha256={'5f0a' * 16}",
        f"  Created wheel for calc: filename=calc-0.2-py3-none-any.whl size=1437 sha256={'5f0a' * 16}",
    ),
    (
        "pip wheel . --no-deps",
        f"  Created wheel for calc: filename=calc-0.1-py3-none-any.whl size=1437 sha256={'5f0a' * 16}",
        f"  Created wheel for calc: filename=calc-0.1-py3-none-any.whl size=91437 sha256={'b1c2' * 16}",
    ),
    ("N=$(wc -l < calc.py); echo started $N", "started 17", "started 23"),
    (COUNTED, "17\n12", "23\n13"),
    (
        "dd if=a of=/tmp/x",
        "1048576 bytes (1.0 MB, 1.0 MiB) copied, 0.00123 s, 853 MB/s",
        "1048577 bytes (1.0 MB, 1.0 MiB) copied, 0.00123 s, 853 MB/s",
    ),
    (
        "python3 -m cProfile run.py",
        f"{PROFILE}      100    0.001    0.000    0.002    0.000 core.py:12(mean)",
        f"{PROFILE}      101    0.001    0.000    0.002    0.000 core.py:12(mean)",
    ),
    (
        "python3 app.py >log 2>&1 & sleep 1; ps -ef | grep app.py",
        "agent 18 12 0 10:00 ? 00:00:00 python3 app.py\nagent 20 12 0 10:00 ? 00:00:00 grep app.py",
        "agent 20 12 0 10:00 ? 00:00:00 grep app.py",
    ),
    ("grep -rn 'def ' .", "b.py:1:def b():\na.py:1:def a():", "a.py:1:def a():\nb.py:2:def b():"),
    ("ls -t", "b.py\na.py", "a.py\nb.py"),
    ("", "b.py\na.py", "a.py\nb.py"),
    ("find . -name '*.py' -exec head -1 {} +", "b.py\na.py", "a.py\nb.py"),
    ("python3 -c 'print(names.find(1))'; find calc", "b.py\na.py", "a.py\nb.py"),
    ("/usr/bin/time -v python3 run.py", "\tExit status: 0", "\tExit status: 1"),
    ("python3 -c 'import os; print(os.getpid()); print(count)'", "100\n5", "109\n6"),
    ("python3 -c 'import time; t = time.time(); print(\"loss\", loss)'", "loss 0.25", "loss 0.75"),
    ("git rev-parse HEAD; git rev-parse main", f"{'1f0c' * 10}\n{'1f0c' * 10}", f"{'aaa0' * 10}\n{'bbb0' * 10}"),
    ("pgrep -f redis-server; pgrep -f worker.py; true", "101", "202"),
    ("pgrep -x python; pgrep -f worker.py", "101\n101", "101\n205"),
    ("pgrep -f app; ./restart.sh > /tmp/r.log 2>&1; pgrep -f app", "101\n101", "201\n202"),
    ("git rev-parse -q --verify v1; git rev-parse -q --verify v2; true", "1f0c" * 10, "aaa0" * 10),
    ("git rev-parse HEAD; git rev-parse --short main", f"{'1f0c' * 10}\n1f0c1f0", f"{'1f0c' * 10}\naaa0aaa"),
    ("date +%s; stat -c %s big", "1796140746\n1796140746", "1796140811\n1796140747"),
    ("git rev-parse HEAD; date +%s", f"{'1f0c' * 10}\n1796140746", f"{'1f0c' * 10}\n1796140747"),
    ("git rev-parse HEAD; sha1sum a", f"{'1f0c' * 10}  a", f"{'aaa0' * 10}  a"),
    ("python3 client.py", "sent\nBrokenPipeError: [Errno 32] Broken pipe", "sent"),
    ("pgrep -c -f app", "1", "2"),
    ("pgrep -f app >/dev/null; wc -l < log", "17", "18"),
    ("pgrep -f app; python3 run.py 2>/dev/null", "17", "18"),
    ("mktemp >/dev/null; ls /tmp/data", "/tmp/data/one", "/tmp/data/two"),
    ("python3 count.py", "1796112822", "1796099999"),
    ("cat notes.txt", "waits (30 ms) for it", "waits (31 ms) for it"),
]


def as_result(text: str) -> str:
    """The result of a command in the form of mini-swe-agent."""
    return f'{{\n  "returncode": 0,\n  "output": {orjson.dumps(text + chr(10)).decode()},\n  "exception_info": ""\n}}'


def as_report(text: str) -> str:
    """The result of a command in the form of Qwen Code."""
    return f"Command: x\nDirectory: (root)\nOutput: {text}\nError: (none)\nExit Code: 0\nProcess Group PGID: 293"


@pytest.mark.parametrize(("before", "later"), VOLATILE)
def test_what_changes_each_time_is_left_out(before: str, later: str) -> None:
    assert without_volatile(before) == without_volatile(later) != before
    assert without_volatile(f"a\n{before}\nb") == without_volatile(f"a\n{later}\nb")
    assert without_volatile(as_result(before)) == without_volatile(as_result(later))
    assert without_volatile(as_report(before)) == without_volatile(as_report(later).replace("293", "4110"))


@pytest.mark.parametrize(("before", "later"), DIFFERENT)
def test_nothing_else_is(before: str, later: str) -> None:
    assert without_volatile(before) != without_volatile(later)
    assert without_volatile(as_result(before)) != without_volatile(as_result(later))
    assert without_volatile(as_report(before)) != without_volatile(as_report(later))


@pytest.mark.parametrize("command", sorted({one for one, _, _ in [*OF_COMMANDS, *OTHERS_OF_COMMANDS]}))
def test_no_command_makes_other_results_equal(command: str) -> None:
    for before, later in DIFFERENT:
        assert without_volatile(before, command) != without_volatile(later, command), before


def test_a_change_of_any_word_outside_of_volatile_parts_is_seen() -> None:
    rng = random.Random(0)
    words = ["error", "12", "0.25", "calc.py:3", "deadbee", "true", "a-b", "v2", "[x]", "1e-3", "#4"]
    for _ in range(2000):
        lines = [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        lines[rng.randrange(len(lines))] += " " + rng.choice([one for one, _ in VOLATILE])
        at = rng.randrange(len(lines))
        first, _, rest = lines[at].partition(" ")
        changed = [*lines[:at], " ".join([rng.choice([one for one in words if one != first]), rest]), *lines[at + 1 :]]
        assert without_volatile("\n".join(lines)) != without_volatile("\n".join(changed))


def as_json(*calls: dict[str, object]) -> str:
    return orjson.dumps(calls).decode()


def bash(command: str) -> str:
    return as_json({"command": command})


@pytest.mark.parametrize(("command", "before", "later"), OF_COMMANDS)
def test_what_a_command_writes_anew(command: str, before: str, later: str) -> None:
    assert without_volatile(before, command) == without_volatile(later, command)
    assert without_volatile(f"a\n{before}\nb", command) == without_volatile(f"a\n{later}\nb", command)
    assert without_volatile(as_result(before), command) == without_volatile(as_result(later), command)
    assert without_volatile(as_report(before), command) == without_volatile(as_report(later), command)


@pytest.mark.parametrize(("command", "before", "later"), OTHERS_OF_COMMANDS)
def test_what_a_command_writes_by_its_work(command: str, before: str, later: str) -> None:
    assert without_volatile(before, command) != without_volatile(later, command)
    assert without_volatile(as_result(before), command) != without_volatile(as_result(later), command)
    assert without_volatile(as_report(before), command) != without_volatile(as_report(later), command)


A, B = "1f0c" * 10, "aaa0" * 10
PYTHON = "python3 server.py & echo $! > server.pid; sleep 2; "
ROW = "agent 18 12 0 10:00 ? 00:00:00 "
OF_OTHER_COMMANDS = [
    # Other programs print, or print in an order that is content.
    ("find src -name '*.py' | wc -l; find tests -name '*.py' | wc -l", "12\n3", "3\n12"),
    ("grep -rl foo src | wc -l && grep -rl bar src | wc -l", "10\n0", "0\n10"),
    ("grep -rhc TODO src/a.py; grep -rhc TODO src/b.py", "1\n2", "2\n1"),
    ("grep -rh -A1 'case' src/a.c", "case 1:\n  x();\ncase 2:\n  y();", "case 1:\n  y();\ncase 2:\n  x();"),
    ("grep -r version config.yml", "version: 1\nversion: 2", "version: 2\nversion: 1"),
    ("grep -rno '[ab]' x", "x:1:a\nx:1:b", "x:1:b\nx:1:a"),
    ("find . -name go.sh | sh", "PASS\nFAIL", "FAIL\nPASS"),
    ("find . -name '*.sql' | sort", "m1.sql\nm2.sql", "m2.sql\nm1.sql"),
    ("find . -type f -printf '%s %p\\n' | sort -rn", "30 a\n20 b", "20 b\n30 a"),
    ("find . '-exec' cat {} +", "a\nb", "b\na"),
    ("find . -name $(./run.sh)", "a\nb", "b\na"),
    ("cd /x & python3 run.py", "2\n1", "1\n2"),
    ("fd -e cfg -x cat {}", "debug=1\n[prod]\n[dev]", "[prod]\ndebug=1\n[dev]"),
    (
        "rg -N --no-heading -A1 def main.py",
        "def a():\n  return 1\ndef b():\n  return 2",
        "def a():\n  return 2\ndef b():\n  return 1",
    ),
    (f"{PYTHON}grep -c ERROR log", "0", "7"),
    (f"{PYTHON}curl -s -o /dev/null -w '%{{http_code}}\\n' localhost:8099/x", "200", "404"),
    ("./srv & echo $! >pid; wc -l < out", "12", "13"),
    ("./t; echo rc=$!; echo rc=$?", "rc=\nrc=0", "rc=\nrc=1"),
    ("python3 -c 'import os; # print(os.getpid())\nprint(total)'", "5", "6"),
    ("pytest -v -k ps | grep -E 'PASSED|FAILED'", "t::a PASSED\nt::b FAILED", "t::a PASSED"),
    ("ps aux | grep -E 'gunicorn|celery worker'", f"{ROW}celery worker\n{ROW}gunicorn", f"{ROW}gunicorn"),
    ("python3 app.py & ps -ef", f"{ROW}python3 app.py\n{ROW}ps -ef", f"{ROW}ps -ef"),
    ("git rev-parse HEAD origin/main", f"{A}\n{A}", f"{A}\n{B}"),
    ("git rev-parse HEAD:calc.py", A, B),
    ("git rev-parse HEAD^{tree}", A, B),
    ("git rev-parse HEAD; wc -c < big", f"{A}\n1234567", f"{A}\n7654321"),
    ("git log -1 --format=%H; python3 sum.py", f"{A}\n12345678", f"{A}\n87654321"),
    ("git rev-list --count HEAD; echo 20240101", "1f0c0ff", "2f0c0ff"),
    ("stat -c %s disk.img", "1717986918", "1900000000"),
    ("cat > a.c <<'E'\nprintf(\"%s\", x);\nE\n./a.out", "1804289383", "1714636915"),
    ("python3 -c 'import time; t=time.time(); print(fib(n))'", "1836311903", "1734567890"),
    ("node -e 'const t=Date.now(); console.log(hash(s))'", "1712345678123", "1712345699999"),
    ("python3 -c 'import time; time.time(); simulate()'", "sim time: 12.50", "sim time: 99.75"),
    ("date -d 2024-06-01 +%s", "1717200000", "1717286400"),
    ("pgrep -f -c app", "1", "2"),
    ("pgrep --count app", "1", "2"),
    ("pgrep -x nginx -c", "1", "2"),
    ("pidof nginx", "12 13 14", "12"),
    ("pgrep app; python3 -c 'print(sum(x for x in a if x>0))'", "17", "18"),
    ("pgrep app; python3 run.py 2>errors", "17", "18"),
    ("ps -o nlwp= -p $(pgrep app)", "4", "9"),
    ("T=$(mktemp); run > $T; ls /tmp/*.txt", "/tmp/baseline.txt", "/tmp/modified.txt"),
    ("mktemp -d /tmp/t.XXXXXX; ls -d /tmp/*", "/tmp/run.passed", "/tmp/run.failed"),
    # Content that looks like what another program measures.
    ("./report", "\tMaximum error: 0.001", "\tMaximum error: 953.2"),
    ("python3 train.py", "  1  0.512  0.812  0.600  0.790 *", "  1  0.112  0.912  0.200  0.990 *"),
    ("./x", "1:02:05", "1:02:06"),
    ("./x", "5user accounts", "9user accounts"),
    ("./x", "item [3] [ERROR] bad", "item [4] [ERROR] bad"),
    ("./x", "killed process [3", "killed process [4"),
    ("./x", "200 loops, best 3", "400 loops, best 3"),
    ("./x", "5 loops each", "7 loops each"),
    ("./link", "capacity: 12.5 MB/s", "capacity: 99.5 MB/s"),
    ("npm test", "✓ retry waits (100 ms)", "✓ retry waits (900 ms)"),
    ("pip x", "ERROR: Pipe to stdout was broken\nok", "ok"),
]
ESCAPED = [
    ('{"name": "caf\\u00e9"}', '{"name": "café"}'),
    ('{"u": "a\\/b"}', '{"u": "a/b"}'),
    ('{"output": "caf\\u00e9"}', '{"output": "café"}'),
    ('{"output": "a\\\\n"}', '{"output": "a\\n"}'),
    ('{"a":"1","b":"2"}', '{"a":"2","b":"1"}'),
    ('{"output": "a\\nb"}', '{"output": "a\nb"}'),
    ('{"outp\\u0075t": "a"}', '{"output": "a"}'),
]


@pytest.mark.parametrize(("command", "before", "later"), OF_OTHER_COMMANDS)
def test_what_a_command_of_another_kind_writes(command: str, before: str, later: str) -> None:
    assert without_volatile(before, command) != without_volatile(later, command)
    assert without_volatile(as_result(before), command) != without_volatile(as_result(later), command)
    assert without_volatile(as_report(before), command) != without_volatile(as_report(later), command)


@pytest.mark.parametrize(("before", "later"), ESCAPED)
def test_other_escapes_are_content(before: str, later: str) -> None:
    for command in ("cat out.json", "grep -rn x a.json"):
        assert without_volatile(before, command) != without_volatile(later, command)


SLOW = [
    ("", "[1<1, {}", "1"),
    ("", "0.1s call a{}", "::"),
    ("", "[00:01<00:01, {}", "1"),
    ("", '{{"returncode": 0, "output": "{}"}}', "\\n"),
    ("", "{}", "1 "),
    ("{}", "1", "echo "),
    ("grep -{} xargs", "a", "r"),
    ("grep {} xargs", "a", "-r "),
    ("{}", "p1 1", "echo p1 $!;"),
    ("pgrep {}", "1", "a "),
    ("find {}", "a", "'a' "),
    ("git rev-parse {}", A, "HEAD "),
    ("{}", "1", "sleep 1 & "),
]


@pytest.mark.parametrize(("command", "text", "repeated"), SLOW)
def test_a_long_text_or_command_takes_little_time(command: str, text: str, repeated: str) -> None:
    """Its time is linear in its length: a quadratic one would take minutes."""
    for length in (4000, 200_000):
        long = [one.format(repeated * (length // len(repeated))) for one in (text, command)]
        began = time.process_time()
        without_volatile(*long)
        volatile_words(*long)
        assert time.process_time() - began < 10


@pytest.mark.parametrize(
    ("command", "written", "used"),
    [
        ("git rev-parse HEAD", A, f"git show {A[:7]}"),
        ("", f"commit {A}", f"git reset --hard {A[:9]}"),
        ("pgrep -f x", "4711\n4712\n4713", "cat 4712"),
    ],
)
def test_a_part_of_a_hash_and_each_of_several_ids_are_names(command: str, written: str, used: str) -> None:
    assert names_any(bash(used), volatile_words(written, command))


@pytest.mark.parametrize(
    "calls",
    [
        *map(
            bash,
            (
                "kill 7",
                "kill -9 7 8",
                "sleep 1; kill -TERM -7",
                "wait 7 && cat out",
                "cat /proc/7/status",
                "tail --pid=7 -f out",
                "ps -p 7 -o stat",
                "lsof -p 7",
                "for p in 7 8; do kill $p; done",
                "SERVER_PID=7 ./stop.sh",
                "python -c 'import os; os.kill(7, 9)'",
                "python -c 'import os; os.killpg(7, 9)'",
                "python -c 'import psutil; psutil.Process(7).terminate()'",
                "if true; then\n\tkill 7\r\nfi",
                "nsenter -t 7 -a ls",
                "taskset -p 7",
                "ionice -c 3 -p 7",
                "top -b -n 1 -p 7",
                "pstree 7",
                "pmap 7",
                "pwdx 7",
                "gcore 7",
                "cpulimit 7",
                "jobs -x echo 7",
                "cat <<E >>x\n\tout.7",
                "cat /tmp/7.sock",
                "cat server-7.log",
                "cat out.7",
            ),
        ),
        as_json({"session_id": 7, "chars": ""}),
        as_json({"shellId": "7"}),
        as_json({"job": 7}),
        as_json({"terminal": "7"}),
        as_json({"command": "ls"}, {"pid": 7}),
    ],
)
def test_a_small_number_that_names_a_process_or_a_file(calls: str) -> None:
    assert names_any(calls, volatile_words("serving, pid 7"))
    assert not names_any(calls, {"70"}) and not names_any(calls, set())


@pytest.mark.parametrize(
    "calls",
    [
        *map(
            bash,
            (
                "head -7 calc.py",
                "head -n 7 calc.py",
                "sed -n 7p calc.py",
                "sed -n '7,9p' calc.py",
                "python -c 'print(range(1, 7))'",
                "timeout 7 pytest -q",
                "sleep 0.03",
                "pip install 'x==1.7'",
                "awaits 7; steps=7; https 7",
                "kill 17",
                "cat /proc/71/status",
            ),
        ),
        as_json({"path": "calc.py", "offset": 7, "limit": 20}),
        as_json({"path": "calc.py", "old": "x = 6", "new": "x = 7"}),
    ],
)
def test_a_small_number_that_names_nothing(calls: str) -> None:
    assert not names_any(calls, volatile_words("serving, pid 7"))
    assert not names_any(calls, {"0.03"})


@pytest.mark.parametrize("command", ["kill $X; sleep 0.03", "cat out-0.03.log", "cat /tmp/0.03"])
def test_a_small_decimal_that_names_something(command: str) -> None:
    assert names_any(bash(command), {"0.03"}) and not names_any(bash(command), {"0.04"})


@pytest.mark.parametrize("number", range(2, 100, 7))
def test_any_small_number_outside_of_names(number: int) -> None:
    """Words beside it may be any but those of processes; the same number in a command on processes is found."""
    rng = random.Random(number)
    words = ["head", "-n", "x", "=", "calc.py", "+", "(", ")", "sed", "--limit", "3", "timeout", "line"]
    for _ in range(200):
        command = rng.choices(words, k=rng.randint(1, 6))
        command.insert(rng.randint(0, len(command)), str(number))
        assert not names_any(bash(" ".join(command)), {str(number)})
        assert names_any(bash(" ".join([*command, "&&", "kill", "$X"])), {str(number)})


@pytest.mark.parametrize(
    ("written", "command"),
    [
        ("serving, pid 4711", "for p in 4711; do stop $p; done"),
        ("Serving HTTP on 0.0.0.0 port 43121", "curl localhost:43121"),
        ("/tmp/tmp.Xa81mPq2oL/out", "cat /tmp/tmp.Xa81mPq2oL/out"),
        ("/tmp/tmpab12cd_x", "cd /tmp && ls tmpab12cd_x"),
        ("[main 1a2b3c4] Mend it", "git show 1a2b3c4"),
        ("/tmp/tmpab12cd_x", "cd /tmp\ntmpab12cd_x/run"),
        ("log-15:00:43.txt", "cat log-15:00:43.txt"),
    ],
)
def test_a_word_that_is_no_small_number_is_a_name_anywhere(written: str, command: str) -> None:
    assert names_any(bash(command), volatile_words(written))
