"""The newest error of a log, and its new lines."""

from pathlib import Path

import pytest

from stack.part_logs import following_logs, last_error, log_size
from tests.unit.stack.test_host_process import eventually


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["INFO up", "Traceback (most recent call last):", '  File "x.py", line 3', "ValueError: head size 96"], None),
        (["ratchet: vLLM has no such output parser: 'qwen4'", "2026-11-23 exited, shutting down"], "ratchet: vLLM"),
        (["FATAL:  could not write lock file", "LOG:  database system is shut down"], "FATAL"),
        (['2026-11-23T21:40:00 \x1b[31merror\x1b[0m queue closed {"wait": "1s"}', "INFO ready"], "2026-11-23T21:40"),
        (["sqlalchemy.exc.ProgrammingError: no such table", "(Background on this error: https://x.y)"], "sqlalchemy"),
    ],
)
def test_the_last_line_that_names_an_error_is_found(tmp_path: Path, lines: list[str], found: str | None) -> None:
    log = tmp_path / "engine.log"
    log.write_text("\n".join(["some error: older", *lines, "all is well"]) + "\n")
    assert last_error(log).startswith(found or "ValueError: head size 96")


def test_only_what_was_written_since_counts(tmp_path: Path) -> None:
    log = tmp_path / "adapter.log"
    log.write_text("ConfigError: of an earlier start\n")
    assert last_error(log, log_size(log)) == ""
    log.write_text("ConfigError: after a rotation\n"[:20])
    assert last_error(log, 10_000).startswith("ConfigError")


def test_passwords_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("OSError: cannot connect to postgresql://ann:s3cr3t@db:5432/ratchet?sslmode=require\n")
    assert "s3cr3t" not in last_error(log) and "postgresql://ann@db:5432/ratchet" in last_error(log)


def test_without_a_log_or_an_error_in_it_there_is_no_error(tmp_path: Path) -> None:
    quiet = "INFO ready\n(pid=3) WARNING 11-23 [utils.py:255] with error like `OSError: [Errno 24]`\nall is well\n\n"
    (tmp_path / "quiet.log").write_text(quiet)
    assert last_error(tmp_path / "quiet.log") == ""
    assert last_error(tmp_path / "none.log") == ""


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
