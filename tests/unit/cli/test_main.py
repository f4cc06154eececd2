"""Numbers on the command line have bounds, and what the machine refuses a command is a sentence: never a traceback."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.models import ParameterInfo
from typer.testing import CliRunner

from cli.main import app
from ratchet.start_variables import start_variables
from tests.unit.cli.test_help_text import commands


def test_every_number_of_every_command_has_bounds() -> None:
    num_found, without = 0, []
    for command in commands(app):
        assert command.callback is not None
        for parameter in inspect.signature(command.callback).parameters.values():
            kind, *settings = get_args(parameter.annotation) or (None,)
            option = next((one for one in settings if isinstance(one, ParameterInfo)), None)
            if option is not None and ({kind, *get_args(kind)} & {int, float} or "list[float]" in str(kind)):
                num_found += 1
                if option.min is None or option.max is None:
                    without.append((command.callback.__module__, parameter.name))
    assert num_found > 15
    assert without == []


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        (["show", "waiting", "--limit", "-1"], "greater than or equal to 1"),
        (["show", "rollouts", "--limit", str(10**30)], "less than or equal to 1000000"),
        (["models", "tiny-policy", "--seed", str(2**70)], "less than or equal to 9223372036854775807"),
        (["tasks", "admit", "x.jsonl", "--limit", "0"], "greater than or equal to 1"),
        (["evaluate", "x", "--temperature", "-3"], "greater than or equal to 0"),
        (["evaluate", "x", "--temperature", "nan"], "less than or equal to 100"),
        (["admin", "logs", "worker", "--lines", "-5"], "greater than or equal to 0"),
        (["models", "checkpoints", "export", "r", "d", "--step", str(2**31)], "less than or equal to 2147483647"),
        (["show", "waiting", "--limit", "9" * 5000], "Unable to parse input string as an integer"),
    ],
)
def test_a_number_beyond_its_bounds_is_a_sentence(arguments: list[str], bound: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())  # the box around the sentence
    assert arguments[-2] in words and bound in words


ROOT = Path(__file__).parents[3]


def ratchet(shell: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in which `$RATCHET` is the program."""
    environment = {**os.environ, "RATCHET": f"{sys.executable} -m cli.main", "RATCHET_HOME": str(home), **variables}
    return subprocess.run(["bash", "-c", shell], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_closed_or_full_stdout_is_no_traceback(tmp_path: Path) -> None:
    closed = ratchet("$RATCHET tasks rules >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    for command in ("tasks rules", "tasks rules --json", "--version"):
        full = ratchet(f"$RATCHET {command} > /dev/full", tmp_path)
        assert full.returncode == 1
        assert full.stderr == "ratchet: this machine refuses a file: No space left on device\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ratchet("$RATCHET tasks build datasets/packages --out $RATCHET_HOME/file/tasks.jsonl --only none", tmp_path)
    assert "Traceback" not in done.stderr and done.stderr.startswith("ratchet: ")


@pytest.mark.parametrize("variables", [{"COLUMNS": "0"}, {"COLUMNS": "3"}, {"RATCHET_STARTED": "soon"}])
def test_odd_variables_do_no_harm(tmp_path: Path, variables: dict[str, str]) -> None:
    done = ratchet("$RATCHET tasks rules", tmp_path, **variables)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("address", ["no port", "127.0.0.1:99999", "http://[::1", " "])
def test_an_address_that_is_none_is_a_sentence(tmp_path: Path, address: str) -> None:
    program = (
        "import asyncio; from ratchet.temporal_client import connect_temporal; "
        "from ratchet.temporal_settings import load_temporal_settings; from cli import main\n"
        "@main.app.command()\n"
        "def ask() -> None:\n"
        "    asyncio.run(connect_temporal(load_temporal_settings(), 0))\n"
        "main.main()\n"
    )
    environment = {**os.environ, "TEMPORAL_ADDRESS": address, "RATCHET_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, "ask"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "expected HOST:PORT" in done.stderr or "does not answer" in done.stderr


def raising(error: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the program with a command that raises this."""
    program = (
        "import errno, socket; from cli import main\n"
        "@main.app.command()\n"
        "def fail() -> None:\n"
        f"    raise {error}\n"
        "main.main()\n"
    )
    environment = {**os.environ, "RATCHET_HOME": str(home), **variables}
    command = [sys.executable, "-c", program, "fail"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("OSError(errno.ECONNREFUSED, 'Connect call failed')", "cannot reach another now: Connect call failed"),
        ("OSError(errno.ENETUNREACH, 'Network is unreachable')", "cannot reach another now: Network is unreachable"),
        ("ConnectionResetError('Connection lost')", "cannot reach another now: Connection lost"),
        ("socket.gaierror(socket.EAI_AGAIN, 'Temporary failure')", "cannot reach another now: Temporary failure"),
        ("OSError(errno.ENOSPC, 'No space left on device')", "refuses a file: No space left on device"),
        ("OSError(errno.EACCES, 'Permission denied')", "refuses a file: Permission denied"),
        ("OSError(errno.ENOENT, 'No such file or directory', '/x/y')", "refuses '/x/y': No such file or directory"),
    ],
)
def test_what_the_machine_or_its_network_refuses_is_a_sentence(tmp_path: Path, error: str, words: str) -> None:
    done = raising(error, tmp_path)
    assert (done.returncode, done.stderr) == (1, f"ratchet: this machine {words}\n")


@pytest.mark.parametrize("error", ["FileNotFoundError(2, 'No such file or directory')", "OSError(errno.EINVAL, 'odd')"])
def test_a_mistake_of_this_program_has_a_traceback(tmp_path: Path, error: str) -> None:
    done = raising(error, tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "in fail" in done.stderr


def test_an_export_names_its_rollout(tmp_path: Path) -> None:
    done = ratchet("$RATCHET view --export $RATCHET_HOME/x", tmp_path)
    assert done.stderr == "ratchet: name the rollout that is exported; `ratchet publish` exports runs\n"


def test_a_key_without_a_certificate_does_not_blame_the_address(tmp_path: Path) -> None:
    call = (
        "__import__('asyncio').run(__import__('ratchet.temporal_client', fromlist=['x']).connect_temporal("
        "__import__('ratchet.temporal_settings', fromlist=['x']).load_temporal_settings(), 0))"
    )
    environment = {"TEMPORAL_TLS_CLIENT_CERT_DATA": "abc", "TEMPORAL_ADDRESS": "127.0.0.1:1"}
    done = raising(call, tmp_path, **environment)
    assert done.returncode == 2 and "TEMPORAL_ADDRESS" not in done.stderr
    assert "TEMPORAL_* variables" in done.stderr and "Must have both client cert and private key" in done.stderr


@pytest.mark.parametrize(
    ("command", "tunables", "expected"),
    [
        ("admin bench", None, "glibc.malloc.hugetlb=1"),
        ("admin bench", "glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("admin bench", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("models tiny-policy", None, "glibc.malloc.hugetlb=1"),
        ("status", None, ""),
    ],
)
def test_a_command_that_computes_starts_with_huge_pages(
    command: str, tunables: str | None, expected: str, tmp_path: Path
) -> None:
    """/proc shows the environment with which the C library has started; glibc cuts it at the colons of its variable."""
    program = (
        "import os, sys; from cli import main\n"
        "def show() -> int:\n"
        "    started = open('/proc/self/environ').read().replace(chr(0), ':').partition('GLIBC_TUNABLES=')[2]\n"
        "    print(':'.join(one for one in started.split(':') if one.startswith('glibc.')))\n"
        "    print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GLIBC_TUNABLES'), os.getpid())\n"
        "    return 0\n"
        "main.run_app = show\n"
        "main.main()\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "OMP_WAIT_POLICY")
    }
    environment |= {"RATCHET_HOME": str(tmp_path)} | ({} if tunables is None else {"GLIBC_TUNABLES": tunables})
    if "GLIBC_TUNABLES" not in start_variables({}):
        pytest.skip("this machine's C library has no such tunable")
    with subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}", *command.split()],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        started, inherited = process.stdout.read().splitlines()
    assert started == expected
    assert inherited == f"PASSIVE {expected or 'glibc.malloc.hugetlb=1'} {process.pid}", "what children get"
