"""File operations, done by a process inside the box's namespaces.

Every path, symlink and `..` resolves inside the box; only open fds of regular files reach the gateway. Each connection
to the box's file socket is one request and has its own process; an idle box has none.

Requests: {op, user, path} with op in open_read, open_write, stat, list {depth}, make_directory, remove, move
{destination}.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable

from sandbox_gateway.boxd import linux_calls
from sandbox_gateway.boxd.namespaces import Namespaces, change_user
from sandbox_gateway.boxd.protocol import (
    BoxFaultError,
    JsonMessage,
    fault_message,
    receive_line,
    report_exception,
    send_with_fds,
)
from sandbox_gateway.boxd.users import BoxUser, find_user, make_directories, names_by_id, resolve_path

_NUM_LISTED_MAX = 50_000
_REQUEST_SECONDS = 300
_OPEN_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO or device must be refused instead of blocking

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EEXIST: "already_exists",
    errno.ENOSPC: "resource_exhausted",
    errno.EDQUOT: "resource_exhausted",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENAMETOOLONG: "invalid_argument",
    errno.EINVAL: "invalid_argument",
}

Reply = tuple[JsonMessage, list[int]]
"""An answer and the fds to pass with it."""


def start_answer(connection: socket.socket, namespaces: Namespaces) -> int:
    """Answer one request in a child process and return its pid, so that a stuck request blocks no other. The child is
    outside the box's pid namespace, so the box cannot see it."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(_REQUEST_SECONDS)
            _enter_alone(connection.fileno(), namespaces)
            _answer(connection, namespaces.num_ids)
        except Exception:
            report_exception()
        finally:
            os._exit(0)
    connection.close()
    return pid


def _enter_alone(connection: int, namespaces: Namespaces) -> None:
    """Enter the box and close every other fd of boxd, because a command's stdin must close when boxd closes it."""
    others = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and int(name) != connection]
    namespaces.enter(("mnt", "uts"))
    change_user(namespaces.num_ids)
    linux_calls.die_with_parent(signal.SIGKILL)  # set last, because a change of user clears it
    os.umask(0o022)
    for fd in others:
        with contextlib.suppress(OSError):  # the fd of the listing itself is closed already
            os.close(fd)


def _answer(connection: socket.socket, num_ids: int) -> None:
    try:
        line = receive_line(connection)
        if not line:
            return
        request = json.loads(line)
        reply, fds = _OPERATIONS[request["op"]](request, find_user(request["user"], num_ids))
    except BoxFaultError as error:
        reply, fds = fault_message(error.code, error.message), []
    except OSError as error:
        words = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        reply, fds = fault_message(_CODES.get(error.errno or 0, "failed_precondition"), words), []
    except ValueError as error:
        reply, fds = fault_message("invalid_argument", f"path cannot be used: {error}"), []
    send_with_fds(connection, reply, fds)


def _open_read(request: JsonMessage, user: BoxUser) -> Reply:
    path = resolve_path(request["path"], user)
    fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    return {"path": path, "size": _require_regular(fd, path).st_size}, [fd]


def _open_write(request: JsonMessage, user: BoxUser) -> Reply:
    path = resolve_path(request["path"], user)
    if os.path.isdir(path) or request["path"].endswith("/"):
        raise BoxFaultError("invalid_argument", f"path is a directory: {path}")
    make_directories(os.path.dirname(path), user)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | _OPEN_FLAGS, 0o644)
    _require_regular(fd, path)
    os.ftruncate(fd, 0)
    os.fchown(fd, user.uid, user.gid)
    return {"path": path, "name": os.path.basename(path)}, [fd]


def _require_regular(fd: int, path: str) -> os.stat_result:
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise BoxFaultError("invalid_argument", f"path is a directory: {path}")
    if not stat.S_ISREG(status.st_mode):
        raise BoxFaultError("invalid_argument", f"path is not a regular file: {path}")
    return status


def _stat(request: JsonMessage, user: BoxUser) -> Reply:
    return {"entry": _entry(resolve_path(request["path"], user), _owner_names())}, []


def _make_directory(request: JsonMessage, user: BoxUser) -> Reply:
    path = resolve_path(request["path"], user)
    if os.path.isdir(path):
        raise BoxFaultError("already_exists", f"directory already exists: {path}")
    make_directories(path, user)
    return {"entry": _entry(path, _owner_names())}, []


def _move(request: JsonMessage, user: BoxUser) -> Reply:
    source, destination = resolve_path(request["path"], user), resolve_path(request["destination"], user)
    os.lstat(source)
    make_directories(os.path.dirname(destination), user)
    os.rename(source, destination)
    return {"entry": _entry(destination, _owner_names())}, []


def _remove(request: JsonMessage, user: BoxUser) -> Reply:
    path = resolve_path(request["path"], user)
    if path == "/":
        raise BoxFaultError("invalid_argument", "the root directory cannot be removed")
    if os.path.isdir(path) and not os.path.islink(path):
        _remove_tree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    return {}, []


def _remove_tree(top: str) -> None:
    for _path, folders, files, directory in os.fwalk(top, topdown=False, onerror=_refuse):
        for name in files:
            os.unlink(name, dir_fd=directory)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=directory)
            except NotADirectoryError:  # a link to a directory
                os.unlink(name, dir_fd=directory)
    os.rmdir(top)


def _refuse(error: OSError) -> None:
    raise error


def _list(request: JsonMessage, user: BoxUser) -> Reply:
    top = resolve_path(request["path"], user)
    if not os.path.isdir(top):
        os.stat(top)
        raise BoxFaultError("invalid_argument", f"path is not a directory: {top}")
    owners, entries = _owner_names(), []
    pending = [(os.path.join(top, name), max(1, request["depth"])) for name in sorted(os.listdir(top), reverse=True)]
    while pending:
        path, depth = pending.pop()
        try:
            entry = _entry(path, owners)
            is_directory = entry["type"] == "FILE_TYPE_DIRECTORY" and "symlinkTarget" not in entry
            below = sorted(os.listdir(path), reverse=True) if depth > 1 and is_directory else []
        except FileNotFoundError:
            continue  # removed between listing and stat
        entries.append(entry)
        pending += [(os.path.join(path, name), depth - 1) for name in below]
        if len(entries) > _NUM_LISTED_MAX:
            raise BoxFaultError("failed_precondition", f"more than {_NUM_LISTED_MAX} entries below {top}; lower depth")
    return {"entries": entries}, []


def _owner_names() -> tuple[dict[int, str], dict[int, str]]:
    return names_by_id("/etc/passwd"), names_by_id("/etc/group")


def _entry(path: str, owners: tuple[dict[int, str], dict[int, str]]) -> JsonMessage:
    """Describe one file as the filesystem RPCs do."""
    status = os.lstat(path)
    mode, seconds = status.st_mode, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(status.st_mtime))
    entry: JsonMessage = {
        "name": os.path.basename(path) or "/",
        "path": path,
        "size": str(status.st_size),
        "mode": stat.S_IMODE(mode),
        "permissions": stat.filemode(mode),
        "owner": owners[0].get(status.st_uid, str(status.st_uid)),
        "group": owners[1].get(status.st_gid, str(status.st_gid)),
        "modifiedTime": f"{seconds}.{status.st_mtime_ns % 10**9:09d}Z",
    }
    if stat.S_ISLNK(mode):
        entry["symlinkTarget"] = os.path.realpath(path)
        try:
            mode = os.stat(path).st_mode
        except OSError:
            mode = 0
    kind = "FILE" if stat.S_ISREG(mode) else "DIRECTORY" if stat.S_ISDIR(mode) else "UNSPECIFIED"
    entry["type"] = f"FILE_TYPE_{kind}"
    return entry


_OPERATIONS: dict[str, Callable[[JsonMessage, BoxUser], Reply]] = {
    "open_read": _open_read,
    "open_write": _open_write,
    "stat": _stat,
    "make_directory": _make_directory,
    "move": _move,
    "remove": _remove,
    "list": _list,
}
