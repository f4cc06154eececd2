"""The launcher: one start per attempt, an enforced deadline, a correct record, and a token that leaves no trace."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from activities.harnesses import launcher
from activities.harnesses.launcher import AgentEnd, StartResult
from ratchet.errors import CommandFailedError
from tests.unit.activities.harnesses.conftest import HostBox

TOKEN = "session-token-that-nobody-may-see"


@pytest.fixture
async def ending_box(host_box: HostBox, agent_user: str) -> AsyncIterator[HostBox]:
    yield host_box
    for attempt in (1, 2):
        await launcher.end_tree(host_box, attempt)
    assert processes_of(agent_user) == []


async def start(box: HostBox, user: str, script: str, *, attempt: int = 1, budget_seconds: float = 60) -> StartResult:
    return await launcher.start_once(
        box, {"command.sh": script.encode()}, TOKEN, attempt=attempt, user=user, budget_seconds=budget_seconds
    )


def states_by_process(user: str) -> dict[int, str]:
    """Return the state letter of each process of a user that is not a zombie.

    A process may end between the listing and the read; it is then left out.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = dict(
                line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line
            )
        except OSError:
            continue
        if fields["Uid"].split("\t")[0] == user and not fields["State"].startswith("Z"):
            found[int(folder.name)] = fields["State"][0]
    return found


def processes_of(user: str) -> list[int]:
    return list(states_by_process(user))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.02)


async def test_runs_the_agent_as_its_user_and_records_its_exit(ending_box: HostBox, agent_user: str) -> None:
    assert await start(ending_box, agent_user, "id -u; pwd; echo trouble >&2; exit 10") == StartResult(started=True)
    record, detail = await launcher.wait_for_exit(ending_box, 1)
    assert (record.exit_code, record.reason, detail) == (10, "exit", "trouble")
    assert 0 <= record.used_seconds == pytest.approx(record.ended - record.started, abs=0.011)
    output = await ending_box.read_file(launcher.output_path(1))
    assert output.decode().split() == [agent_user, f"{ending_box.root}/run-agent/1"]
    assert len(ending_box.commands) == 2


async def test_the_second_start_of_an_attempt_starts_nothing(ending_box: HostBox, agent_user: str) -> None:
    script = f"echo once >> {ending_box.root}/run-agent/../log; echo started; sleep 0.2"
    tries = await asyncio.gather(*(start(ending_box, agent_user, script) for _ in range(5)))
    assert sorted(each.started for each in tries) == [False] * 4 + [True]
    await launcher.wait_for_exit(ending_box, 1)
    assert await start(ending_box, agent_user, script) == StartResult(started=False)
    assert await ending_box.read_file(launcher.output_path(1)) == b"started\n"
    assert {entry.name for entry in (ending_box.root / "run").iterdir()} == {"1"}, "what later tries brought is gone"
    assert (await start(ending_box, agent_user, "exit 0", attempt=2)).started


# Ignores the signals that can be ignored, and leaves children in sessions of their own.
STUBBORN = (
    "trap '' TERM HUP; setsid sh -c 'trap \"\" TERM HUP; sleep 300 & sleep 300' & (setsid sleep 300 &) ; sleep 300"
)


async def suspend(box: HostBox, user: str, script: str = STUBBORN) -> AgentEnd:
    """Start an agent and return the launcher's record of its suspension at the deadline."""
    await start(box, user, script, budget_seconds=1)
    return await launcher.wait_for_exit(box, 1)


def states_of(user: str) -> str:
    """Return the letters of the states that a user's processes are in, each once."""
    return "".join(sorted(set(states_by_process(user).values())))


async def test_the_deadline_suspends_the_tree_until_it_is_resumed(ending_box: HostBox, agent_user: str) -> None:
    record, _ = await suspend(ending_box, agent_user)
    assert (record.reason, record.exit_code) == ("reached", None)
    assert 1 <= record.used_seconds <= record.ended - record.started
    assert states_of(agent_user) == "T" and len(processes_of(agent_user)) >= 5
    await launcher.extend_deadline(ending_box, 1, 500)  # a watcher that knows nothing of the suspension
    assert (await launcher.wait_for_exit(ending_box, 1))[0].reason == "reached"
    assert await launcher.is_suspended(ending_box, 1)
    await launcher.resume_suspended(ending_box, 1, 1000)
    assert not await launcher.is_suspended(ending_box, 1)
    await until(lambda: states_of(agent_user) == "S")
    moved = float(await ending_box.read_file("/run/ratchet/1/deadline"))
    assert record.ended + 1000 <= moved < record.ended + 1060
    await launcher.stop(ending_box, 1, "deadline")  # too late, as of a worker that was slow
    await launcher.resume_suspended(ending_box, 1, 5)
    assert float(await ending_box.read_file("/run/ratchet/1/deadline")) == moved
    assert len(processes_of(agent_user)) >= 5


async def test_a_resumed_agent_ends_by_itself(ending_box: HostBox, agent_user: str) -> None:
    gate = ending_box.root / "gate"
    await suspend(ending_box, agent_user, f"until [ -e {gate} ]; do sleep 0.1; done; exit 3")
    await launcher.resume_suspended(ending_box, 1, 1000)
    gate.touch()
    record, _ = await launcher.wait_for_exit(ending_box, 1)
    assert (record.exit_code, record.reason) == (3, "exit")


async def test_an_agent_that_is_stopped_at_its_deadline_has_used_its_budget(
    ending_box: HostBox, agent_user: str
) -> None:
    reached, _ = await suspend(ending_box, agent_user)
    await until(lambda: box_clock() > reached.ended + 1)
    await launcher.stop(ending_box, 1, "deadline")
    record, _ = await launcher.wait_for_exit(ending_box, 1)
    assert (record.reason, record.used_seconds) == ("deadline", reached.used_seconds)
    assert record.ended > reached.ended + 1
    assert processes_of(agent_user) == []


def box_clock() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


async def test_a_suspended_agent_can_be_ended_or_stopped(ending_box: HostBox, agent_user: str) -> None:
    await suspend(ending_box, agent_user)
    await launcher.stop(ending_box, 1, "guard")
    assert (await launcher.wait_for_exit(ending_box, 1))[0].reason == "guard"
    assert processes_of(agent_user) == []
    await start(ending_box, agent_user, STUBBORN, attempt=2, budget_seconds=1)
    assert (await launcher.wait_for_exit(ending_box, 2))[0].reason == "reached"
    await launcher.end_tree(ending_box, 2)
    assert processes_of(agent_user) == []
    assert (await launcher.wait_for_exit(ending_box, 2))[0].reason == "ended"


async def test_extending_moves_the_deadline_from_the_start_not_from_now(ending_box: HostBox, agent_user: str) -> None:
    await start(ending_box, agent_user, "sleep 300", budget_seconds=1000.5)
    began = float(await ending_box.read_file("/run/ratchet/1/started"))
    for _ in range(2):
        await launcher.extend_deadline(ending_box, 1, 7.25)
    assert float(await ending_box.read_file("/run/ratchet/1/deadline")) == pytest.approx(
        began + 1000.5 + 7.25, abs=0.011
    )


async def test_a_killed_launcher_is_a_crash_and_its_agent_can_still_be_ended(
    ending_box: HostBox, agent_user: str
) -> None:
    await start(ending_box, agent_user, "sleep 300")
    await until(lambda: len(processes_of(agent_user)) == 2)
    waiting = asyncio.create_task(launcher.wait_for_exit(ending_box, 1))
    _boot_id, pid, start_time = (await ending_box.read_file("/run/ratchet/1/launcher")).decode().split()
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19] == start_time
    os.kill(int(pid), signal.SIGKILL)
    record, _ = await waiting
    assert (record.exit_code, record.reason) == (None, "crashed")
    assert processes_of(agent_user)
    await launcher.end_tree(ending_box, 1)
    assert processes_of(agent_user) == []


async def test_ending_ends_the_tree_while_somebody_waits(ending_box: HostBox, agent_user: str) -> None:
    await start(ending_box, agent_user, "setsid sleep 300 & sleep 300")
    waiting = asyncio.create_task(launcher.wait_for_exit(ending_box, 1))
    await until(lambda: len(processes_of(agent_user)) == 3)
    await launcher.end_tree(ending_box, 1)
    assert processes_of(agent_user) == []
    assert (await waiting)[0].reason == "ended"
    await launcher.end_tree(ending_box, 1)


async def test_ending_right_after_the_start_leaves_nothing_that_starts_later(
    ending_box: HostBox, agent_user: str
) -> None:
    await start(ending_box, agent_user, "sleep 300")
    await launcher.end_tree(ending_box, 1)
    assert processes_of(agent_user) == []
    assert (await launcher.wait_for_exit(ending_box, 1))[0].reason == "ended"


async def test_ending_in_the_midst_of_a_start_leaves_nothing_that_starts_later(
    ending_box: HostBox, agent_user: str
) -> None:
    slow = ending_box.root / "slow"
    slow.mkdir()
    os.mkfifo(slow / "gate")
    (slow / "mv").write_text(
        f'#!/bin/sh\ncase $3 in */deadline) read -r _ <"{slow}/gate" ;; esac\nPATH=/usr/bin:/bin exec mv "$@"\n'
    )
    (slow / "mv").chmod(0o755)
    path = ending_box.env["PATH"]
    ending_box.env["PATH"] = f"{slow}:{path}"
    starting = asyncio.create_task(start(ending_box, agent_user, "sleep 300"))
    await until(lambda: (ending_box.root / "run/1/started").exists())
    ending_box.env["PATH"] = path
    await launcher.end_tree(ending_box, 1)
    await asyncio.to_thread((slow / "gate").write_text, "go on\n")
    assert await starting == StartResult(started=True)
    assert (await launcher.wait_for_exit(ending_box, 1))[0].reason == "ended"
    assert processes_of(agent_user) == []


async def test_the_token_is_in_no_file_and_no_argument(ending_box: HostBox, agent_user: str) -> None:
    await start(ending_box, agent_user, 'echo "${#RATCHET_SESSION_TOKEN}"; sleep 300')
    await until(
        lambda: (ending_box.root / "run/1/output").exists() and (ending_box.root / "run/1/output").read_text() != ""
    )
    assert (ending_box.root / "run/1/output").read_text() == f"{len(TOKEN)}\n"
    for path in ending_box.root.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert TOKEN.encode() not in command_line.read_bytes(), command_line
        except (FileNotFoundError, ProcessLookupError):
            continue
    assert TOKEN not in "".join(ending_box.commands)


async def test_the_agent_cannot_reach_the_launcher(ending_box: HostBox, agent_user: str) -> None:
    script = "cat ../../run/1/launcher; ls ../../run; echo x >> command.sh; touch mine; kill -9 $PPID; echo survived"
    await start(ending_box, agent_user, script)
    record, complaints = await launcher.wait_for_exit(ending_box, 1)
    assert (record.exit_code, record.reason) == (0, "exit")
    assert await ending_box.read_file(launcher.output_path(1)) == b"survived\n"
    assert complaints.count("ermission denied") + complaints.count("not permitted") == 5


async def test_a_missing_user_is_said_so(ending_box: HostBox) -> None:
    for user in ("nobody-of-that-name", "root"):
        with pytest.raises(CommandFailedError, match="user"):
            await start(ending_box, user, "exit 0")


async def test_an_attempt_that_was_never_started_ends_as_nothing_and_cannot_be_awaited(ending_box: HostBox) -> None:
    await launcher.end_tree(ending_box, 7)
    with pytest.raises(CommandFailedError):
        await launcher.wait_for_exit(ending_box, 7)


async def test_waiting_for_an_agent_that_has_ended_returns_its_end(ending_box: HostBox, agent_user: str) -> None:
    await start(ending_box, agent_user, "exit 0")
    for _ in range(2):
        assert (await launcher.wait_for_exit(ending_box, 1))[0].exit_code == 0


def test_an_exit_record_of_another_shape_is_refused() -> None:
    with pytest.raises(CommandFailedError):
        launcher.parse_exit('{"exit_code": 0}\n')
