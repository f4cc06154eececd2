"""Attempts to leave a box or to bring down the machine or the gateway: each is contained and answered, never with a
500.

The page "Sandboxes" claims about containment what this file tests. An agent could make each of these attempts.
"""

import asyncio
import gzip
import json
import os
import socket
import struct
import urllib.parse
from typing import Any

import pytest

from ratchet.errors import CommandFailedError, SandboxGoneError
from sandbox_gateway import disk_template
from sandbox_gateway.boxd import cgroups, seccomp
from sandboxes.base import Sandbox
from sandboxes.e2b import E2BProvider
from tests.integration.sandbox_gateway.conftest import CHECKOUT, PLANTED, GatewayProcess, host_address, make_box

needs_limits = pytest.mark.skipif(cgroups.usable_version() == 0, reason="this machine has no writable control groups")
needs_disk = pytest.mark.skipif(
    not disk_template.is_possible(), reason="this machine has no loop devices or no mkfs.ext4"
)
needs_filter = pytest.mark.skipif(not seccomp.PROGRAM, reason="no system call table for this machine type")


def python(code: str) -> str:
    return f"/opt/ratchet/bin/python3 - <<'PYTHON'\n{code}\nPYTHON"


# ---- file system and /proc

LOOKS_OUTSIDE = [
    f"cat {CHECKOUT}/pyproject.toml",
    f"cat /../../../../..{CHECKOUT}/pyproject.toml",
    "cat /proc/1/root/etc/shadow.host /proc/1/root/../../etc/machine-id",
    f"ls /proc/1/root{CHECKOUT}",
    f"ls /proc/1/cwd{CHECKOUT}",
    f"for p in /proc/[0-9]*; do ls $p/root{CHECKOUT} && exit 0; done; exit 1",
    "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ | grep -q ^E2B_ && exit 0; done; exit 1",
    "for fd in /proc/[0-9]*/fd/*; do "
    "case $(readlink $fd) in /*box.json*|*ctl.sock*|*disk.img*) exit 0;; esac; done; exit 1",
    "head -c 1 /dev/loop0",
    "cat /dev/mem",
    "cat /dev/sda /dev/vda /dev/nvme0n1",
    "cat /proc/kcore",
    "cat /sys/kernel/security/lsm",
]
CHANGES_OUTSIDE = [
    "mount --bind / /mnt",
    "mount -t proc proc /mnt",
    "mount -t cgroup2 none /mnt || mount -t cgroup -o memory none /mnt",
    "mount -o remount,rw /usr",
    "umount /usr",
    "pivot_root /tmp /tmp",
    "mknod /tmp/disk b 7 0",
    "mknod /tmp/mem c 1 1",
    "echo x > /proc/sys/kernel/core_pattern",
    "echo 1 > /proc/sys/kernel/panic",
    "echo b > /proc/sysrq-trigger",
    "echo x > /proc/sys/kernel/hostname",
    "hostname other",
    "date -s @0",
    "nsenter -t 1 -m true",
    "unshare -U true",
    "unshare -n true",
    "chroot /proc/1/root /bin/true/../sh -c 'exit 0' && mount -t tmpfs x /mnt",
    "swapoff -a && echo off | grep x",
    "reboot -f",
    "insmod /tmp/x.ko",
    "ip link add dummy0 type dummy",
    "iptables -L",
]


@pytest.mark.parametrize("attempt", LOOKS_OUTSIDE + CHANGES_OUTSIDE)
@pytest.mark.parametrize("user", ["root", "agent"])
async def test_nothing_outside_is_seen_or_changed(shared_box: Sandbox, attempt: str, user: str) -> None:
    assert (await shared_box.exec(attempt, user=user, check=False, timeout=60)).exit_code != 0, attempt
    assert (await shared_box.exec("echo alive")).stdout == "alive\n"


_SEARCH = """
import os, re, stat
needles = [{needles}]

def content(path, start=0, size=1 << 22):
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)
    except (OSError, ValueError, OverflowError):
        return b""

def memory(pid):
    for line in content(f"/proc/{{pid}}/maps").decode().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if line.split()[1].startswith("r") and not line.endswith("[vvar]"):
            yield content(f"/proc/{{pid}}/mem", start, end - start)

def sources():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline", "comm", "mountinfo", "cgroup", "stack"):
            yield f"{{name}} of {{pid}}", content(f"/proc/{{pid}}/{{name}}")
        if int(pid) not in (os.getpid(), os.getppid()):
            for part in memory(pid):
                yield f"memory of {{pid}}", part
        fds = f"/proc/{{pid}}/fd"
        for fd in os.listdir(fds) if os.access(fds, os.R_OK) else ():
            path = f"{{fds}}/{{fd}}"
            if os.path.lexists(path):
                yield path, os.fsencode(os.readlink(path))
                if os.path.exists(path) and stat.S_ISREG(os.stat(path).st_mode):
                    yield path, content(path)
    for top in ("/run", "/tmp", "/var", "/root", "/home", "/etc", "/workspace", "/dev/shm", "/mnt", "/srv"):
        for folder, _folders, files in os.walk(top):
            for name in files:
                path = os.path.join(folder, name)
                if stat.S_ISREG(os.lstat(path).st_mode):
                    yield path, os.fsencode(path) + content(path)

seen = [where for where, data in sources()]
print("\\n".join(sorted({{where for where, data in sources() if any(needle in data for needle in needles)}})))
assert any(where.startswith("environ of 1") for where in seen) and len(seen) > 50
"""


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_no_secret_of_the_gateway_is_in_a_box(
    shared_box: Sandbox, gateway: GatewayProcess, raw_box: dict[str, Any], user: str
) -> None:
    """Nothing that the gateway got by its environment, command line or open files is inherited, and no box's token."""
    tokens = [raw_box["envdAccessToken"], gateway.call("GET", f"/sandboxes/{shared_box.id}").json()["envdAccessToken"]]
    # in two parts, so that the search does not find itself
    needles = ", ".join(f"b{text[:9]!r} + b{text[9:]!r}" for text in (PLANTED, gateway.settings.api_key, *tokens))
    found = await shared_box.exec(python(_SEARCH.format(needles=needles)), user=user, timeout=120)
    assert found.stdout.strip() == ""


async def test_pid_1_and_commands_have_an_environment_of_our_own(shared_box: Sandbox) -> None:
    first = (await shared_box.exec("tr '\\0' '\\n' < /proc/1/environ | cut -d= -f1")).stdout.split()
    assert set(first) <= {"PWD"}
    names = (await shared_box.exec("env | cut -d= -f1", env={"MINE": "1"})).stdout.split()
    assert set(names) <= {"PATH", "HOME", "USER", "LOGNAME", "LANG", "RATCHET_PATH", "PWD", "SHLVL", "_", "MINE"}


async def test_a_setuid_program_gives_nothing(shared_box: Sandbox) -> None:
    await shared_box.exec("cp /bin/bash /tmp/suid && chmod 4755 /tmp/suid")
    assert (await shared_box.exec("/tmp/suid -p -c 'id -u'", user="agent")).stdout == "1000\n"


async def test_links_out_of_the_box_end_inside(shared_box: Sandbox, gateway: GatewayProcess) -> None:
    """Symbolic links, `..` and the root of pid 1, through the file service, which runs on the host's side."""
    await shared_box.exec(
        "mkdir -p /tmp/l; ln -sfn / /tmp/l/root; ln -sfn /proc/1/root /tmp/l/one; ln -sfn ../../../.. /tmp/l/up"
    )
    for path in (f"/tmp/l/root{CHECKOUT}/Makefile", f"/tmp/l/one{CHECKOUT}/Makefile", f"/tmp/l/up{CHECKOUT}/Makefile"):
        with pytest.raises(FileNotFoundError):
            await shared_box.read_file(path)
    await shared_box.write_file("/tmp/l/root/tmp/inside", "x")
    assert (await shared_box.exec("cat /tmp/inside")).stdout == "x"


# ---- the file and process services themselves


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/tmp/%00x", {400}),
        ("", {400}),
        ("/loop/a", {400, 404}),
        ("/" + "x" * 300, {400}),
        ("/" + "a/" * 3000, {400, 404}),
        ("/proc/self/mem", {400, 403, 404}),
        ("/proc/kmsg", {400, 403, 404}),
        ("/dev/zero", {400}),
        ("/dev/ptmx", {400, 403, 404}),
        ("/dev/full", {400, 404}),
        ("/tmp/fifo", {400}),
        ("/tmp/socket", {400}),
        ("\udcff", {400, 404}),
    ],
)
def test_odd_paths_are_refused(gateway: GatewayProcess, raw_box: dict[str, Any], path: str, statuses: set[int]) -> None:
    make = "mkdir -p /loop; ln -s /loop/b /loop/a; ln -s /loop/a /loop/b; mkfifo /tmp/fifo;" + python(
        "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/socket')"
    )
    started = {"process": {"cmd": "/bin/bash", "args": ["-c", make]}}
    assert call_stream(gateway, raw_box, started) == 200
    for method, options in (
        ("GET", {}),
        ("POST", {"content": b"x", "headers": {"Content-Type": "application/octet-stream"}}),
    ):
        encoded = path if "%" in path else urllib.parse.quote(path, safe="/", errors="surrogateescape")
        answer = gateway.call_box(raw_box, method, f"/files?path={encoded}", **options)
        allowed = statuses | (
            {200} if method == "POST" and path == "\udcff" else set()
        )  # an unusual name, and otherwise an ordinary file of the box
        assert answer.status_code in allowed, (method, path[:40], answer.status_code, answer.text[:200])


def call_stream(gateway: GatewayProcess, box: dict[str, Any], message: dict[str, Any]) -> int:
    body = json.dumps(message).encode()
    headers = {"Content-Type": "application/connect+json"}
    return gateway.call_box(
        box, "POST", "/process.Process/Start", content=struct.pack(">BI", 0, len(body)) + body, headers=headers
    ).status_code


@pytest.mark.parametrize(
    "method", ["Start", "Connect", "List", "SendSignal", "SendInput", "StreamInput", "CloseStdin", "Update", "GetMore"]
)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"process": {"pid": 1e99}}', b'{"process": {"cmd": "\\u0000"}}', b"\xff" * 100],
)
def test_garbage_is_answered_in_the_protocol(
    gateway: GatewayProcess, raw_box: dict[str, Any], method: str, body: bytes
) -> None:
    for content_type in ("application/json", "application/connect+json"):
        answer = gateway.call_box(
            raw_box, "POST", f"/process.Process/{method}", content=body, headers={"Content-Type": content_type}
        )
        assert answer.status_code < 500 or answer.status_code == 501, (answer.status_code, answer.text[:200])


@needs_disk
def test_a_gzip_bomb_fills_the_boxs_disk_only(gateway: GatewayProcess, raw_box: dict[str, Any]) -> None:
    bomb = gzip.compress(bytes(400 << 20), 9)
    headers = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    answer = gateway.call_box(raw_box, "POST", "/files?path=/tmp/bomb", content=bomb, headers=headers)
    assert answer.status_code == 507, answer.text
    assert gateway.call("GET", "/health").status_code == 204


# ---- using things up


@needs_disk
async def test_a_disk_filler_fills_its_own_disk(box: Sandbox) -> None:
    result = await box.exec("head -c 400M /dev/zero > /tmp/filler", check=False)
    assert result.exit_code != 0 and "No space left" in result.stderr
    with pytest.raises(CommandFailedError, match="No space left"):
        await box.write_file("/workspace/x", bytes(1 << 20))
    assert (await box.exec("rm /tmp/filler; echo x > /workspace/y; cat /workspace/y")).stdout == "x\n"


@needs_disk
async def test_many_small_files_end_with_the_disk(box: Sandbox) -> None:
    made = python("""
import os
os.makedirs("/tmp/many")
try:
    for number in range(10**6):
        os.close(os.open(f"/tmp/many/{number}", os.O_CREAT))
except OSError as error:
    print(error.errno)
""")
    assert (await box.exec(made, timeout=300)).stdout.strip() == "28"
    assert (await box.exec("rm -r /tmp/many; echo alive", timeout=300)).stdout == "alive\n"


async def test_a_flood_of_output_is_cut_and_said_so(box: Sandbox, gateway: GatewayProcess) -> None:
    result = await box.exec("head -c 300M /dev/zero | tr '\\0' 'x'", timeout=300, check=False)
    assert result.exit_code == -1, "what is left of the output is not taken for all of it"
    assert "output ends here" in result.stderr and len(result.stdout) < 257 << 20
    assert (await box.exec("echo alive")).stdout == "alive\n"


@needs_limits
async def test_a_fork_bomb_of_root_takes_only_its_own_box(
    box: Sandbox, provider: E2BProvider, gateway: GatewayProcess
) -> None:
    """A box's root can exhaust the box, but not its neighbours or the gateway, and cannot prevent the box's end."""
    bomb = asyncio.create_task(box.exec("bomb() { bomb | bomb & }; bomb; sleep 300", check=False, timeout=None))
    async with await make_box(provider) as neighbour:
        assert (await neighbour.exec("echo alive")).stdout == "alive\n"
    assert await provider.kill(box.id)
    with pytest.raises(SandboxGoneError):
        await bomb


@needs_limits
async def test_a_memory_hog_in_shared_memory_is_contained(box: Sandbox) -> None:
    filled = await box.exec("head -c 900M /dev/zero > /dev/shm/x", check=False, timeout=120)
    assert filled.exit_code != 0
    assert (await box.exec("rm -f /dev/shm/x; echo alive")).stdout == "alive\n"


async def test_signals_reach_nobody_outside(box: Sandbox, provider: E2BProvider) -> None:
    async with await make_box(provider) as neighbour:
        sleeper = asyncio.create_task(neighbour.exec("sleep 3; echo slept"))
        await box.exec("kill -9 -1; true", check=False)
        await box.exec("for p in $(seq 1 400); do kill -9 $p 2>/dev/null; done; true", check=False)
        assert (await sleeper).stdout == "slept\n"
    assert (await box.exec("echo alive")).stdout == "alive\n"


@needs_filter
async def test_every_command_runs_under_the_filter(shared_box: Sandbox) -> None:
    for user in ("root", "agent"):
        status = (await shared_box.exec("grep ^Seccomp: /proc/self/status", user=user)).stdout.split()
        assert status == ["Seccomp:", "2"]
    threads = "import threading\nt = threading.Thread(target=print, args=('thread',))\nt.start()\nt.join()"
    assert (await shared_box.exec(python(threads))).stdout == "thread\n"
    refused = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.syscall({}, 0, 0, 0, 0, 0), ctypes.get_errno())"
    )
    for number in (425, 442) if os.uname().machine != "x86_64" else (425, 442, 321, 250, 304, 323):
        assert (await shared_box.exec(python(refused.format(number)))).stdout.split() == ["-1", "1"], number


# ---- the network


@pytest.mark.parametrize("user", ["root", "agent"])
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
async def test_no_address_is_reachable(shared_box: Sandbox, user: str, family: str) -> None:
    addresses = ["169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1", "1.1.1.1", host_address()]
    if family == "AF_INET6":
        addresses = ["fe80::1", "2606:4700::1111", "::ffff:1.1.1.1"]
    tries = f"""
import socket
for address in {addresses!r}:
    for kind, port in ((socket.SOCK_STREAM, 80), (socket.SOCK_STREAM, 22), (socket.SOCK_DGRAM, 53)):
        s = socket.socket(socket.{family}, kind)
        s.settimeout(1)
        try:
            s.connect((address, port))
            s.send(b"x")
            print("reached", address, port)
        except OSError:
            pass
"""
    assert (await shared_box.exec(python(tries), user=user, timeout=120)).stdout == ""


async def test_no_raw_or_abstract_sockets_lead_out(shared_box: Sandbox) -> None:
    """Abstract unix sockets belong to a network namespace, packet sockets need a capability."""
    abstract = "import socket\nfor line in open('/proc/net/unix').read().splitlines()[1:]: print(line)"
    assert (await shared_box.exec(python(abstract))).stdout == ""
    raw = "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)"
    assert (await shared_box.exec(python(raw), check=False)).exit_code != 0


@needs_filter
@pytest.mark.parametrize("user", ["root", "agent"])
async def test_only_listed_socket_families_pass(shared_box: Sandbox, user: str) -> None:
    """A family such as AF_VSOCK leads out of the network namespace. Numbers are also tried with a high bit, which the
    kernel ignores.
    """
    socket_call, pair_call = (41, 53) if os.uname().machine == "x86_64" else (198, 199)
    tries = f"""
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
pair = (ctypes.c_int * 2)()
passed = set()
for family in (*range(51), -1, 1 << 30):
    for number in (family, family + (1 << 32)):
        for kind in (*range(1, 7), 10):
            for call in ({socket_call}, {pair_call}):
                ctypes.set_errno(0)
                made = libc.syscall(call, ctypes.c_long(number), ctypes.c_long(kind), 0, pair)
                if made >= 0 or ctypes.get_errno() != errno.EAFNOSUPPORT:
                    passed.add(family)
print(*sorted(passed))
"""
    listed = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    assert set(map(int, (await shared_box.exec(python(tries), user=user)).stdout.split())) == listed
