"""A gateway of a user other than root: the contract and the attempts to escape, with what its mode lacks left out."""

import base64
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from activities.harnesses.launcher import read_output, start_once, wait_for_exit
from activities.sandbox_probe import SandboxProbe
from grading.git_scripts import diff_script, prepare_script
from grading.run_hidden_tests import UnusableBoxError, run_tests
from ratchet.errors import CommandFailedError
from sandbox_gateway.boxd.id_modes import ONE_ID, SUBORDINATE_IDS, WITHOUT_CGROUPS, IdMode
from sandbox_gateway.settings import GatewaySettings
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import (
    CHECKOUT,
    DEADLINE_SECONDS,
    GatewayProcess,
    eventually,
    make_box,
    running,
)
from tests.integration.sandbox_gateway.contract import *  # noqa: F403
from tests.integration.sandbox_gateway.image_files import PROGRAMS, make_tree, tree_layer, write_sif, write_unsquashfs
from tests.integration.sandbox_gateway.ordinary_user import USER, OrdinaryUser, ordinary_user
from tests.integration.sandbox_gateway.test_durability import (  # noqa: F401
    test_a_box_ends_itself_without_a_gateway_and_is_cleared_away,
    test_a_dead_boxd_takes_its_box_along,
    test_a_hung_boxd_beyond_its_time_is_ended_before_its_slot_is_free,
    test_a_killed_fork_server_is_started_anew,
    test_boxes_outlive_the_gateway,
    test_kill_leaves_nothing,
)
from tests.integration.sandbox_gateway.test_escape import (  # noqa: F401
    CHANGES_OUTSIDE,
    LOOKS_OUTSIDE,
    test_a_flood_of_output_is_cut_and_said_so,
    test_a_setuid_program_gives_nothing,
    test_every_command_runs_under_the_filter,
    test_garbage_is_answered_in_the_protocol,
    test_links_out_of_the_box_end_inside,
    test_no_address_is_reachable,
    test_no_raw_or_abstract_sockets_lead_out,
    test_no_secret_of_the_gateway_is_in_a_box,
    test_odd_paths_are_refused,
    test_only_listed_socket_families_pass,
    test_pid_1_and_commands_have_an_environment_of_our_own,
    test_signals_reach_nobody_outside,
)
from tests.integration.sandbox_gateway.test_isolation import FORK_BOMB

_SECOND_USER = {
    "test_exec_env_cwd_and_home",
    "test_text_files_and_owners",
    "test_two_users_are_apart",
    "test_a_setuid_program_gives_nothing",
    "test_processes_are_limited_in_sum",
}
"""Tests that boxes with one user cannot pass."""
_AGENT = b"echo changed >/workspace/file; id -u\n"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test in every mode that has what the test needs."""
    modes = (SUBORDINATE_IDS,) if metafunc.function.__name__ in _SECOND_USER else (SUBORDINATE_IDS, ONE_ID)
    metafunc.parametrize("mode", modes, ids=lambda mode: mode.name.rpartition(" with ")[2], scope="module")


@pytest.fixture(scope="module")
def caller(mode: IdMode, python_layer: Path) -> Iterator[OrdinaryUser]:
    with ordinary_user(mode, [python_layer]) as made:
        probe = "from sandbox_gateway.machine_probe import require_sandbox_support; require_sandbox_support()"
        tried = as_user(made, probe)
        if tried.returncode != 0:
            pytest.skip(tried.stderr.strip().rpartition("\n")[2])
        yield made


@pytest.fixture(scope="module")
def gateway(caller: OrdinaryUser, make_settings: Callable[[Path], GatewaySettings]) -> Iterator[GatewayProcess]:
    settings = make_settings(caller.home / "gateway").model_copy(update={"images_directory": caller.home / "images"})
    yield from running(settings, caller.prefix)


@pytest.fixture
def own_gateway(caller: OrdinaryUser, make_settings: Callable[[Path], GatewaySettings]) -> Iterator[GatewayProcess]:
    """A gateway for one test that kills and restarts it."""
    yield from running(make_settings(caller.home / f"own-{uuid.uuid4().hex}"), caller.prefix)


def as_user(caller: OrdinaryUser, program: str) -> "subprocess.CompletedProcess[str]":
    command = [*caller.prefix, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)


async def test_nothing_outside_is_seen_or_changed(shared_box: Sandbox) -> None:
    for name in ("root", "agent"):
        attempts = enumerate(LOOKS_OUTSIDE + CHANGES_OUTSIDE)
        tries = "\n".join(f"( {attempt} ) >/dev/null 2>&1 && echo {number}" for number, attempt in attempts)
        assert (await shared_box.exec(f"{tries}\ntrue", user=name, timeout=120)).stdout == ""


def test_no_process_of_a_gateway_has_more_rights_than_its_user(gateway: GatewayProcess) -> None:
    fork_server = gateway.fork_server()
    status = Path(f"/proc/{fork_server}/status").read_text().split("\nUid:")[1].split()
    assert status[:4] == [str(USER)] * 4
    assert os.readlink(f"/proc/{fork_server}/ns/user") != os.readlink("/proc/self/ns/user")


async def test_memory_is_limited_per_process_and_the_number_of_processes_per_user(box: Sandbox) -> None:
    hog = await box.exec("/opt/ratchet/bin/python3 -c 'x = bytearray(900 << 20)'", check=False)
    assert hog.exit_code == 1 and "MemoryError" in hog.stderr
    await box.write_file("/workspace/bomb.py", FORK_BOMB)
    bomb = await box.exec("/opt/ratchet/bin/python3 /workspace/bomb.py", user="agent", check=False)
    assert bomb.exit_code == 9 and int(bomb.stdout) < 96
    tries = "ulimit -Hn; ulimit -n 4097 && echo raised; ulimit -n 1024 && echo lowered"
    assert (await box.exec(tries, check=False)).stdout == "4096\nlowered\n", "boxd looks at each open file"


_FAMILY = """\
import os, time
memory = b"x" * (70 << 20)
for _ in range(5):
    if os.fork() == 0:
        break
print("begun", flush=True)
time.sleep(600)
"""
_HOG = "import time; memory = b'x' * (210 << 20); time.sleep(600)"


async def test_memory_is_limited_in_sum(box: Sandbox) -> None:
    """The largest process is killed. Memory that processes share counts once."""
    await box.write_file("/workspace/family.py", _FAMILY)
    begun = 'while [ "$(grep -c begun /tmp/said)" != 6 ]; do sleep 0.05; done'
    await box.exec(f"/opt/ratchet/bin/python3 /workspace/family.py >/tmp/said 2>&1 & {begun}")
    for _ in range(2):
        hog = await box.exec(f'exec /opt/ratchet/bin/python3 -c "{_HOG}"', check=False, timeout=DEADLINE_SECONDS)
        assert hog.exit_code == -1
    assert (await box.exec("pgrep -fc '[f]amily.py'")).stdout == "6\n"


async def test_processes_are_limited_in_sum(box: Sandbox) -> None:
    """The newest are killed."""
    for user in ("root", "agent"):
        await box.exec("for _ in $(seq 55); do sleep 600 >/dev/null 2>&1 & done", user=user, check=False)

    async def is_limited() -> bool:
        counted = await box.exec("ps -eo comm,user --no-headers", check=False)  # a new one may be killed, too
        rows = [tuple(line.split()) for line in counted.stdout.splitlines()]
        return counted.exit_code == 0 and rows.count(("sleep", "root")) == 55 and len(rows) <= 96 + 2

    await eventually(is_limited)


async def test_no_file_of_a_box_outlives_it(provider: E2BProvider, gateway: GatewayProcess) -> None:
    """Among them are files of other ids and a directory without any mode."""
    box = await make_box(provider)
    await box.exec("mkdir -p /tmp/a/b && echo x >/tmp/a/b/c && chmod 0 /tmp/a/b && chown -R agent: /tmp/a || true")
    await box.kill()

    async def gone() -> bool:
        left = [gateway.box_directory(box.id), *(gateway.settings.root_directory / "trash").iterdir()]
        return not any(path.exists() for path in left)

    await eventually(gone)


async def test_an_image_keeps_the_owners_that_a_box_has(
    provider: E2BProvider, gateway: GatewayProcess, caller: OrdinaryUser, mode: IdMode
) -> None:
    tree = make_tree(caller.home / "tree", (*PROGRAMS, "rm"))
    os.chown(tree / "srv/from-image", 1000, 1000)
    os.chown(tree / "bin/bash", USER, USER)
    add = "from pathlib import Path; from sandbox_gateway.image_store import ImageStore; "
    add += f"print(ImageStore(Path('{caller.home}/images')).add(Path('{tree}'), 'small', print).reference)"
    imported = as_user(caller, add)
    assert imported.stdout.split()[-1:] == ["small:latest"], imported.stderr
    async with await provider.create(
        "small", ttl_seconds=300, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as box:
        owner = (await box.exec("stat -c %u:%g /srv/from-image")).stdout.strip()
        assert owner == ("0:0" if mode is ONE_ID else "1000:1000")
        assert (await box.exec("stat -c %u:%g /bin/bash")).stdout == "0:0\n", "the importing user's"
        await box.exec("rm -r /srv && mkdir /srv")
        assert (await box.exec("ls -A /srv")).stdout == "", "the new directory hides what the image has there"


async def test_a_sif_file_keeps_owners_and_modes_also_of_files_that_cannot_be_read(
    provider: E2BProvider, caller: OrdinaryUser, mode: IdMode
) -> None:
    tree = make_tree(caller.home / "of-sif", (*PROGRAMS, "rm"))
    (tree / "srv/closed").mkdir()
    for name, bits in (("etc/gshadow", 0), ("srv/only-run", 0o4111), ("srv/closed", 0)):
        if name != "srv/closed":
            (tree / name).write_text("secret\n")
        os.chown(tree / name, 1000, 1000)
        (tree / name).chmod(bits)
    write_unsquashfs(caller.home / "bin")
    sif = write_sif(caller.home / "closed.sif", tree_layer(tree))
    add = "from pathlib import Path; from sandbox_gateway.image_store import ImageStore; import os; "
    add += f"os.environ['PATH'] = '{caller.home}/bin:' + os.environ['PATH']; "
    add += f"ImageStore(Path('{caller.home}/images')).add(Path('{sif}'), 'closed', print)"
    imported = as_user(caller, add)
    assert imported.returncode == 0, imported.stderr
    async with await provider.create(
        "closed", ttl_seconds=300, metadata={}, idempotency_key=uuid.uuid4().hex, network=False
    ) as box:
        found = await box.exec("cat /etc/gshadow; stat -c '%a %u:%g' /etc/gshadow /srv/only-run /srv/closed")
        owner = "0:0" if mode is ONE_ID else "1000:1000"
        assert found.stdout.splitlines() == ["secret", f"0 {owner}", f"4111 {owner}", f"0 {owner}"]


async def test_agents_and_tests_have_users_that_the_box_has(box: Sandbox, mode: IdMode) -> None:
    """In a box with one user neither starts, but for tests of root."""
    user = "root" if mode is ONE_ID else "agent"
    files = ["echo 'def test_it(): pass' >test_it.py", "echo base >file"]
    await box.exec(prepare_script("/workspace", files, None, user=user))
    starting = start_once(box, {"command.sh": _AGENT}, "token", attempt=1, user="agent", budget_seconds=60)
    command = "/opt/ratchet/bin/python3 -m pytest -q test_it.py"
    if mode is ONE_ID:
        with pytest.raises(CommandFailedError) as failed:
            await starting
        assert "one user" in failed.value.stderr
        with pytest.raises(UnusableBoxError, match="one user"):
            await run_tests(box, command, "/workspace", 60)
    else:
        await starting
        assert (await wait_for_exit(box, 1)).record.reason == "exit"
        assert await read_output(box, 1, 100) == b"1000\n"
        diff = (await box.exec(diff_script("/workspace", 10_000))).stdout.split()[-1]
        assert b"+changed" in base64.b64decode(diff)
    report = await run_tests(box, command, "/workspace", 60, user=user)
    assert report.exit_code == 0 and [one.tests for one in report.top_sessions] == [{"test_it.py::test_it": "passed"}]


async def test_a_run_in_boxes_with_one_user_is_refused(
    provider: E2BProvider, adapter_address: str, mode: IdMode
) -> None:
    found = await SandboxProbe(provider, f"http://{adapter_address}").problem("host")
    assert ("one user" in found and "ratchet doctor" in found) if mode is ONE_ID else found == ""


def test_doctor_names_what_the_mode_lacks(caller: OrdinaryUser, mode: IdMode) -> None:
    said = as_user(
        caller,
        "from sandbox_gateway.machine_probe import probe_machine\n"
        "for found in probe_machine(): print(found.name, found.on, found.reason, sep='|')",
    ).stdout
    rows = {line.split("|")[0]: line.split("|")[1:] for line in said.splitlines() if line}
    lacks = replace(mode, lacks=(*mode.lacks, *WITHOUT_CGROUPS)).words
    assert rows["ids and limits of a box"] == ["False", f"the gateway runs as {lacks}"]
    assert rows["user namespaces"][0] == rows["bubblewrap"][0] == "True"
    assert (rows["memory and process limits"][0], rows["disk limit"][0]) == ("False", "False")
    assert all(reason for _on, reason in rows.values())
