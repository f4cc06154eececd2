"""Texts that differ in what changes each time become equal; texts that differ in anything else do not."""

import random

import pytest

from adapter.turns.volatile_text import without_volatile

VOLATILE = [
    ("-rw-r--r-- 1 agent agent 12 Nov 29 10:00 calc.py", "-rw-r--r-- 1 agent agent 12 Dec  1 09:13 calc.py"),
    ("-rw-r--r-- 1 a a 12 Jan  3  2025 calc.py", "-rw-r--r-- 1 a a 12 Jan 13  2026 calc.py"),
    ("Sat Nov 29 15:00:43 UTC 2026", "Sun Nov  1 05:10:43 UTC 2026"),
    ("Date:   Sun Nov 29 15:00:43 2026 +0000", "Date:   Mon Nov 30 08:00:00 2026 +0000"),
    ("2026-11-29T15:00:43.123Z started", "2026-12-01T00:10:43.9Z started"),
    ("2026-11-29 15:00:43,123 INFO ready", "2026-11-30 15:00:44,001 INFO ready"),
    ("3 passed, 1 failed in 0.12s", "3 passed, 1 failed in 11.02s"),
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
    ("http://localhost:8080/ ready", "http://localhost:40123/ ready"),
]
DIFFERENT = [
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
]


@pytest.mark.parametrize(("before", "later"), VOLATILE)
def test_what_changes_each_time_is_left_out(before: str, later: str) -> None:
    assert without_volatile(before) == without_volatile(later) != before
    assert without_volatile(f"a\n{before}\nb") == without_volatile(f"a\n{later}\nb")


@pytest.mark.parametrize(("before", "later"), DIFFERENT)
def test_nothing_else_is(before: str, later: str) -> None:
    assert without_volatile(before) != without_volatile(later)


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
