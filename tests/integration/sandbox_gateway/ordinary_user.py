"""Programs as a user other than root, with and without subordinate ids, which this machine need not have.

They run in a mount namespace in which that user can reach the interpreter, and /etc/subuid has a range for it or not.
A shell with file capabilities stands in for `newuidmap` and `newgidmap` if they are not installed.
"""

import os
import shlex
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.boxd.id_modes import SUBORDINATE_IDS, IdMode
from tests.integration.sandbox_gateway.conftest import CHECKOUT

USER = 65_534
_RANGE = "nobody:700000:65536\n"
_MAY_SET_IDS = struct.pack("<5I", 0x02000001, 1 << 6 | 1 << 7, 0, 0, 0)  # CAP_SETGID and CAP_SETUID, effective
_MAPPER = """#!{shell}
process=$1 map=
shift
while [ $# -gt 0 ]; do
  map="$map$1 $2 $3
"
  shift 3
done
printf %s "$map" >/proc/$process/{file}
"""


@dataclass(frozen=True)
class OrdinaryUser:
    """`prefix`: of a command, that makes it the user's. `home`: a directory of the user, which others can reach."""

    home: Path
    prefix: Sequence[str]


@contextmanager
def ordinary_user(mode: IdMode, needed: Sequence[Path]) -> Iterator[OrdinaryUser]:
    """Yield a user with the ids of the mode. `needed`: directories that it can reach, besides those of the program."""
    home = Path(tempfile.mkdtemp(prefix="ratchet-user-"))
    try:
        home.chmod(0o755)
        ranges = home / "ranges"
        ranges.write_text(_RANGE if mode is SUBORDINATE_IDS else "")
        shutil.chown(home, USER, USER)
        if shutil.which("newuidmap") is None:
            _make_mappers(home / "bin")
        lines = [
            "set -e",
            "mount --make-rprivate /",
            "touch /etc/subuid /etc/subgid",
            *(f"mount --bind {ranges} {file}" for file in ("/etc/subuid", "/etc/subgid")),
            *_opened([Path(sys.base_prefix), Path(sys.prefix), CHECKOUT, *needed], home / "opened"),
            f"umask 077; export HOME={home} PATH={home}/bin:$PATH",
            f'exec setpriv --reuid={USER} --regid={USER} --clear-groups "$@"',
        ]
        yield OrdinaryUser(home, ("unshare", "-m", "bash", "-c", "\n".join(lines), "bash"))
    finally:
        shutil.rmtree(home, ignore_errors=True)  # a process of the gateway may still remove what it finds


def _make_mappers(directory: Path) -> None:
    directory.mkdir()
    shell = directory / "sh"
    shutil.copy("/bin/dash", shell)
    os.setxattr(shell, "security.capability", _MAY_SET_IDS)
    for name, file in (("newuidmap", "uid_map"), ("newgidmap", "gid_map")):
        (directory / name).write_text(_MAPPER.format(shell=shell, file=file))
        (directory / name).chmod(0o755)


def _opened(needed: Sequence[Path], stage: Path) -> list[str]:
    """Return the lines that show these directories below parents that are closed to others, which show nothing else."""
    closed: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(needed):
        for parent in reversed(path.resolve().parents):
            if not os.stat(parent).st_mode & 0o001:
                closed.setdefault(parent, []).append(path.resolve())
                break
    lines = []
    for number, (parent, paths) in enumerate(closed.items()):
        kept = [(shlex.quote(str(path)), f"{stage}/{number}-{at}") for at, path in enumerate(paths)]
        lines += [f"mkdir -p {place} && mount --bind {path} {place}" for path, place in kept]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(parent))}")
        lines += [f"mkdir -p {path} && mount --bind {place} {path}" for path, place in kept]
    return lines
