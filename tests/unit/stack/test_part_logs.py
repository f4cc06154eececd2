"""The first error of a log, and its new lines."""

from pathlib import Path

import pytest

from stack.part_logs import first_error, following_logs, log_size
from tests.unit.stack.test_host_process import eventually


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["INFO up", "Traceback (most recent call last):", '  File "x.py", line 3', "ValueError: head size 96"], None),
        (["ratchet: vLLM has no such output parser: 'qwen4'", "2026-11-23 exited, shutting down"], "ratchet: vLLM"),
        (["FATAL:  could not write lock file", "LOG:  database system is shut down"], "FATAL"),
        (['2026-11-23T21:40:00 \x1b[31merror\x1b[0m queue closed {"wait": "1s"}', "error: later"], "2026-11-23T21:40"),
        (["RuntimeError: no GPU is left", "RuntimeError: the engine has ended; see above"], "RuntimeError: no GPU"),
        (["OSError: refused", "ratchet.errors.ConfigError: no such model"], "ratchet.errors.ConfigError"),
        (["ratchet.errors.ConfigError: of a task", "ratchet: the port is taken"], "ratchet: the port"),
        (["ratchet: the store is slow to answer; it is waited for", "ValueError: x"], "ValueError: x"),
        (["DistBackendError: NCCL error, run with NCCL_DEBUG=INFO for details"], "DistBackendError: NCCL"),
        (["RuntimeError: the level is one of DEBUG, INFO and [info]"], "RuntimeError: the level"),
        (["sqlalchemy.exc.ProgrammingError: no such table", "(Background on this error: https://x.y)"], "sqlalchemy"),
    ],
)
def test_the_first_line_that_is_an_error_is_found(tmp_path: Path, lines: list[str], found: str | None) -> None:
    log = tmp_path / "engine.log"
    log.write_text("\n".join(["INFO no error", *lines, "all is well"]) + "\n")
    assert first_error(log).startswith(found or "ValueError: head size 96")


def test_errors_of_the_clients_of_postgres_do_not_count(tmp_path: Path) -> None:
    begin = "2026-11-29 11:22:33.444 UTC [31] "
    told = ('ERROR:  syntax error at or near "selct"', "STATEMENT:  selct", "FATAL:  too many clients already")
    log = tmp_path / "postgres.log"
    log.write_text("\n".join([*(f"{begin}client {line}" for line in told), "\tFROM error", ""]))
    assert first_error(log) == ""
    with log.open("a") as file:
        file.write(f"{begin}ERROR:  could not fsync file: No space left on device\n")
    assert "No space left" in first_error(log)


def test_only_what_was_written_since_counts(tmp_path: Path) -> None:
    log = tmp_path / "adapter.log"
    log.write_text("ConfigError: of an earlier start\n")
    assert first_error(log, log_size(log)) == ""
    log.write_text("ConfigError: after a rotation\n"[:20])
    assert first_error(log, 10_000).startswith("ConfigError")


def test_the_end_of_a_long_log_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("INFO works\n" * 300_000 + "ValueError: at the end\n")
    assert first_error(log) == "ValueError: at the end"


def test_passwords_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("OSError: cannot connect to postgresql://ann:s3cr3t@db:5432/ratchet?sslmode=require\n")
    assert "s3cr3t" not in first_error(log) and "postgresql://ann@db:5432/ratchet" in first_error(log)


def test_without_a_log_or_an_error_in_it_there_is_no_error(tmp_path: Path) -> None:
    quiet = "INFO ready\n(pid=3) WARNING 11-23 [utils.py:255] with error like `OSError: [Errno 24]`\nall is well\n\n"
    quiet += "h1:31:32 [0] NCCL INFO error is 0\n2026-11-29 11:22:33.444 UTC [31] WARNING:  no error\n"
    quiet += "2026-11-29 11:22:33 [info     ] no error\n2026-11-29T11:22:33.444Z\tinfo\tno error\n"
    (tmp_path / "quiet.log").write_text(quiet)
    assert first_error(tmp_path / "quiet.log") == ""
    assert first_error(tmp_path / "none.log") == ""


def test_new_lines_of_all_logs_are_followed_over_a_rotation(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text("old\n" * 20)
    found: list[tuple[str, str]] = []
    with following_logs(tmp_path, lambda part, line: found.append((part, line))):
        with (tmp_path / "worker.log").open("a") as log:
            log.write("one\nhal")
        (tmp_path / "engine.log").write_text("\x1b[32mloads\x1b[0m\n\n")
        eventually(lambda: len(found) == 2)
        with (tmp_path / "worker.log").open("a") as log:
            log.write("f\n")
        (tmp_path / "worker.log").rename(tmp_path / "worker.log.1")
        (tmp_path / "worker.log").write_text('{"event": "ready", "level": "info"}\n')
    assert ("engine", "loads") in found
    *lines, ready = [line for part, line in found if part == "worker"]
    assert lines == ["one", "half"] and "ready" in ready
