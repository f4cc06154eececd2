"""Users and paths as the box itself defines them: commands and file operations run as users of its own /etc/passwd."""

import os
from dataclasses import dataclass, replace

from sandbox_gateway.boxd.protocol import BoxFaultError

_USER_OF_E2B, _UNPRIVILEGED = "user", "agent"


@dataclass(frozen=True, slots=True)
class BoxUser:
    name: str
    uid: int
    gid: int
    home: str
    groups: list[int]


def find_user(name: str, num_ids: int) -> BoxUser:
    """Find a user by name or number with an optional `:group`, as images write it. Root and numbers need no passwd
    entry; E2B's `user` is our unprivileged user in a box without one of that name. In a box with one id, each is root.
    """
    user = _read_user(name)
    return user if num_ids > 1 else replace(user, uid=0, gid=0, groups=[])


def _read_user(name: str) -> BoxUser:
    wanted, _, group = name.partition(":")
    for fields in read_database("/etc/passwd", 7):
        if wanted in (fields[0], fields[2]) and fields[3].isdigit():
            gid = _find_group(group) if group else int(fields[3])
            groups = [int(row[2]) for row in read_database("/etc/group", 4) if fields[0] in row[3].split(",")]
            return BoxUser(fields[0], int(fields[2]), gid, fields[5] or "/", [gid, *groups])
    if wanted == "root" or wanted.isdecimal():
        uid, gid = int(wanted) if wanted != "root" else 0, _find_group(group) if group else 0
        return BoxUser(wanted, uid, gid, "/root" if uid == 0 else "/", [gid])
    if wanted == _USER_OF_E2B:
        return _read_user(_UNPRIVILEGED)
    raise BoxFaultError("unauthenticated", f"invalid username: '{name}'")


def _find_group(name: str) -> int:
    for fields in read_database("/etc/group", 4):
        if name in (fields[0], fields[2]):
            return int(fields[2])
    if name.isdecimal():
        return int(name)
    raise BoxFaultError("unauthenticated", f"invalid group: '{name}'")


def names_by_id(path: str) -> dict[int, str]:
    return {int(fields[2]): fields[0] for fields in read_database(path, 3)}


def read_database(path: str, num_fields: int) -> list[list[str]]:
    """Return the well-formed lines of a colon-separated system file; a missing file counts as empty."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            rows = [line.rstrip("\n").split(":") for line in lines]
    except OSError:
        return []
    return [row for row in rows if len(row) >= num_fields and row[2].isdigit()]


def resolve_path(path: str, user: BoxUser) -> str:
    """Return an absolute path; relative ones and `~` start at the user's home. Raises BoxFaultError if invalid."""
    if "\0" in path:
        raise BoxFaultError("invalid_argument", "path contains a NUL byte")
    if path.startswith("~"):
        if len(path) > 1 and path[1] != "/":
            raise BoxFaultError("invalid_argument", f"cannot expand the home of another user: '{path}'")
        path = user.home + path[1:]
    return os.path.normpath(os.path.join(user.home, path))


def make_directories(path: str, user: BoxUser) -> None:
    """Create `path` and its missing parents, owned by the user."""
    missing: list[str] = []
    while not os.path.isdir(path):
        if os.path.lexists(path):
            raise BoxFaultError("invalid_argument", f"path is not a directory: {path}")
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        os.mkdir(directory, 0o755)
        os.chown(directory, user.uid, user.gid)
