"""Sleeping parts under the real supervisord: interrupted `up`, an unreachable gateway, errors in one line."""

import ast
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ratchet.config import RunConfig
from ratchet.errors import MachineError
from ratchet.start_variables import start_variables
from stack.parts import Part, Stack
from stack.serving_plan import ServingPlan, load_plan, read_plan, wants_other, write_plan
from stack.supervisor import Supervisor
from stack.watcher import Watcher
from tests.free_ports import free_ports

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 120


class Sleepers(Stack):
    """A stack whose parts do nothing; the adapter ends slowly."""

    def parts(self) -> list[Part]:
        slow = "trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done"
        return [Part("engine", ["sleep", "1000"], 40), Part("adapter", ["sh", "-c", slow], 50, stop_group=False)]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Sleepers]:
    free_ports(tmp_path)
    stack = Sleepers(tmp_path)
    Supervisor(stack).up()
    yield stack
    Supervisor(stack).down()


def _wait_for(stack: Stack, states: dict[str, str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := {part.name: part.state for part in Supervisor(stack).states()}) != states:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_up_starts_what_stands_still(stack: Sleepers) -> None:
    """An `up` interrupted while it stopped engine and adapter: one is down, one is still stopping."""
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    supervisor = Supervisor(stack)
    supervisor.stop("engine")
    supervisor._ask("stopProcess", "adapter", False)
    assert {part.name: part.state for part in supervisor.states()} == {"engine": "stopped", "adapter": "stopping"}
    supervisor.up()
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    pids = {part.name: part.pid for part in supervisor.states()}
    supervisor.up()
    assert {part.name: part.pid for part in supervisor.states()} == pids, "what runs is left alone"


def test_a_part_starts_with_the_variables_of_our_processes(stack: Sleepers) -> None:
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    environments = [psutil.Process(part.pid).environ() for part in Supervisor(stack).states()]
    for environment in environments:
        assert environment.items() >= start_variables(os.environ).items()


def test_up_and_down_at_once_do_not_end_what_the_other_has_begun(stack: Sleepers) -> None:
    """The last one decides: here an `up` that comes while a slow `down` waits."""
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    down = threading.Thread(target=Supervisor(stack).down)
    down.start()
    while not any(part.state == "stopping" for part in Supervisor(stack).states()) and down.is_alive():
        time.sleep(0.01)
    Supervisor(stack).up()
    down.join(PATIENCE_SECONDS)
    assert not down.is_alive()
    _wait_for(stack, {"engine": "running", "adapter": "running"})


def test_a_part_whose_logs_were_deleted_starts_again(stack: Sleepers) -> None:
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    shutil.rmtree(stack.home / "logs")

    async def watch() -> None:
        watcher = Watcher(stack)
        await watcher._look()
        await watcher.probes.close()

    asyncio.run(watch())
    pid = {part.name: part.pid for part in Supervisor(stack).states()}["engine"]
    os.kill(pid or 0, signal.SIGKILL)
    psutil.Process(pid).wait(PATIENCE_SECONDS) if psutil.pid_exists(pid or 0) else None
    _wait_for(stack, {"engine": "running", "adapter": "running"})


def test_up_restarts_nothing_after_loopback_was_added_to_no_proxy(
    stack: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox provider adds it to the environment of the process that later calls `up` again."""
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    supervisor = Supervisor(stack)
    pids = {part.name: part.pid for part in supervisor.states()}
    monkeypatch.setenv("NO_PROXY", ",".join(filter(None, [os.environ.get("NO_PROXY"), "localhost", "127.0.0.1"])))
    supervisor.up()
    assert {part.name: part.pid for part in supervisor.states()} == pids


def test_another_model_is_wanted_until_its_plan_is_written(tmp_path: Path) -> None:
    """The parts serve the plan that they read when they start: until it is written, the next `up` restarts them."""
    stack = Stack(tmp_path)
    one, other = (
        RunConfig.model_validate({"model": f"/{name}", "datasets": [{"path": "x"}]}) for name in ("one", "other")
    )
    assert not wants_other(read_plan(stack), one)
    write_plan(stack, ServingPlan(config=one, model_path=Path("/one")))
    assert wants_other(read_plan(stack), other) and not wants_other(read_plan(stack), one)
    write_plan(stack, ServingPlan(config=other, model_path=Path("/other")))
    assert not wants_other(read_plan(stack), other) and load_plan(stack).sets["default"].config == other


def test_down_goes_on_where_the_gateway_is_away(stack: Sleepers) -> None:
    command = [sys.executable, "-m", "cli.main", "down", "--boxes"]
    variables = {**os.environ, "RATCHET_HOME": str(stack.home)}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0 and "could not stop sandboxes" in ended.stderr and "Traceback" not in ended.stderr, (
        ended.stderr
    )
    assert not Supervisor(stack).is_up()


def test_an_error_with_a_name_is_a_sentence() -> None:
    program = """
import sys
from cli import main
from ratchet.errors import EngineUnavailableError

@main.app.command()
def fails() -> None:
    raise EngineUnavailableError("no engine answers")

sys.argv = ["ratchet", "fails"]
main.main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "ratchet: no engine answers\n")


def test_no_module_of_the_user_hides_one_of_ours(tmp_path: Path) -> None:
    """Every part's command runs in a directory whose files have the names of our packages and of two libraries."""
    for name in ("cli", "stack", "engine", "ratchet", "sandbox_gateway", "training", "supervisor", "vllm", "ray"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the user')")
    for part in Stack(tmp_path).parts():
        ended = subprocess.run([*part.command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0 and part.name in ended.stdout, (part.name, ended.stdout, ended.stderr)


def test_every_python_process_of_ours_leaves_the_working_directory_out() -> None:
    """A command list that begins with `sys.executable` has `-P` or `-I` next."""
    for path in subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split():
        if not path.startswith("tests/"):
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                    assert ast.unparse(node.elts[1]) in ("'-P'", "'-I'"), f"{path}:{node.lineno}"


def test_a_suspended_supervisord_is_named_instead_of_waited_for(stack: Sleepers) -> None:
    pid = int((stack.home / "supervisord.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        with pytest.raises(MachineError, match=f"kill -CONT {pid}"):
            Supervisor(stack).up()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert Supervisor(stack).is_up()


def test_a_stack_whose_socket_is_gone_can_be_ended(stack: Sleepers) -> None:
    """Without its socket a supervisord looks as if it had ended; it must not start again what is ended."""
    _wait_for(stack, {"engine": "running", "adapter": "running"})
    pids = [part.pid for part in Supervisor(stack).states()]
    pids.append(int((stack.home / "supervisord.pid").read_text()))
    (stack.home / "supervisor.sock").unlink()
    Supervisor(stack).down()
    assert not [pid for pid in pids if pid is not None and psutil.pid_exists(pid)]


@pytest.mark.parametrize("name", ["gateway.key", "ports.json", "stack.json"])
def test_a_state_file_without_content_is_named(name: str, tmp_path: Path) -> None:
    Sleepers(tmp_path).environment()
    (tmp_path / name).write_text("")
    with pytest.raises(MachineError, match=name):
        stack = Sleepers(tmp_path)
        stack.environment()
        load_plan(stack)
