from pathlib import Path

from structlog.testing import capture_logs

from ratchet import unexplained_errors
from ratchet.errors import SandboxBusyError
from ratchet.unexplained_errors import log_unexplained
from sandboxes.docker_errors import service_errors
from sandboxes.e2b_errors import translate


def test_a_kind_is_logged_once_with_its_traceback() -> None:
    unexplained_errors._logged.clear()

    def own_bug(number: int) -> None:
        raise KeyError(f"missing {number}")

    with capture_logs() as logged:
        for number in range(3):
            try:
                own_bug(number)
            except KeyError as error:
                log_unexplained("not understood", error, subject="box")
        log_unexplained("not understood", ValueError("raised elsewhere"))
    assert [line["kind"] for line in logged] == ["builtins.KeyError", "builtins.ValueError"]
    assert "own_bug" in logged[0]["traceback"] and logged[0]["subject"] == "box"
    assert Path(logged[0]["place"].rpartition(":")[0]).name == Path(__file__).name


def test_kinds_are_bounded() -> None:
    unexplained_errors._logged.clear()
    with capture_logs() as logged:
        for number in range(2 * unexplained_errors._MAX_KINDS):
            log_unexplained("not understood", type(f"Odd{number}Error", (Exception,), {})())
    unexplained_errors._logged.clear()
    assert len(logged) == unexplained_errors._MAX_KINDS


def test_own_bugs_in_calls_of_a_service_are_waited_for_and_logged() -> None:
    unexplained_errors._logged.clear()
    with capture_logs() as logged:
        for _ in range(2):
            assert isinstance(translate(AttributeError("no field"), "box"), SandboxBusyError)
            try:
                with service_errors("box"):
                    raise KeyError("State")
            except SandboxBusyError:
                pass
        assert isinstance(translate(ConnectionResetError("reset"), "box"), SandboxBusyError)
    assert [line["kind"] for line in logged] == ["builtins.AttributeError", "builtins.KeyError"]
    assert "service_errors" not in logged[0]["event"] and 'KeyError("State")' in logged[1]["traceback"]
