"""Unpack layers over each other into one directory, with the result that an overlay file system would show.

An archive is untrusted input: a child process that has made the directory its root unpacks every layer, so links and
`..` cannot leave it. The child has the ids of a box.

Whiteouts follow the OCI image specification: `.wh.NAME` removes NAME of lower layers, `.wh..wh..opq` removes all that
lower layers put into its directory. Devices are skipped, because boxes have their own, and so are extended attributes.
"""

import contextlib
import errno
import glob
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zstandard

from ratchet.errors import ConfigError
from sandbox_gateway.boxd.command_launch import PATH_KEEPER, SYSTEM_PATH
from sandbox_gateway.boxd.id_modes import IdMode, enter_own_namespaces, id_mode
from sandbox_gateway.boxd.linux_calls import CLONE_NEWUSER, setns
from sandbox_gateway.boxd.namespaces import change_user, make_user_namespace
from sandbox_gateway.image_archive import ImageSource, blamed, decompressed

_WHITEOUT, _META, _OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"
_NOBODY = 65_534
_BUFFER_BYTES = 1 << 20
_PROFILE_SCRIPT = "/etc/profile.d/zz-ratchet-path.sh"
_PROFILE = f"""\
# Login shells reset PATH; this restores the image's own.
[ -z "${{{PATH_KEEPER}}}" ] || export PATH="${{{PATH_KEEPER}}}"
"""
_SCRIPTS = ("/.singularity.d/env/10-docker*.sh", "/.singularity.d/env/9[01]-environment.sh")
"""The scripts by which an Apptainer image sets its environment, in order."""
_MAX_SCRIPT_CHARACTERS, _MAX_LINE_CHARACTERS = 1 << 16, 4096
_ASSIGNMENT = re.compile(r'(export\s+)?([A-Za-z_]\w*)=(?:"?\$\{\2:-(.*)\}"?|(.*?))(?:;|\s+#.*)?', re.ASCII)
_VALUE = re.compile(r"""'([^']*)'|"((?:[^"\\`]|\\.)*)"|([^\s"'\\`;&|<>()#~]*)""")
_EXPANSION = re.compile(r'\\([\\"$`])|\$(?:(\w+)|\{(\w+)\})|\$', re.ASCII)
_BLOCK_BEGINS, _BLOCK_ENDS = {"if", "case", "for", "while", "until", "{", "("}, {"fi", "esac", "done", "}", ")"}
_HOSTS = "127.0.0.1\tlocalhost box\n::1\tlocalhost\n"


@dataclass(frozen=True, slots=True)
class Unpacked:
    """`digest`: of the last layer as a stream. `env`: also of the image's scripts; `left_out`: their other lines."""

    digest: str
    env: dict[str, str]
    left_out: list[str]


def unpack(source: ImageSource, rootfs: Path) -> Unpacked:
    """Fill the empty directory `rootfs`. Raises ConfigError that names the layer if it cannot be unpacked or its digest
    differs from the config's."""
    digest = ""
    for layer in source.layers:
        with contextlib.ExitStack() as held:
            with blamed(f"layer {layer.name}"):
                stream = held.enter_context(layer.open())
            digest = _in_root(rootfs, partial(_unpack_layer, stream), f"layer {layer.name}")
        if layer.diff_id not in (None, digest):
            raise ConfigError(f"layer {layer.name} is damaged: it is {digest}, the image's config says {layer.diff_id}")
    env, scripts = dict(source.env), _in_root(rootfs, partial(_complete, source.workdir), "the image's last touches")
    return Unpacked(digest, env, read_scripts(scripts, env))


def _in_root(rootfs: Path, work: Callable[[], str], what: str) -> str:
    """Run `work` in a child whose root directory is `rootfs` and return its result. Raises ConfigError if it fails."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(writing, str(rootfs), work)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = json.loads(pipe.read() or b'{"error": "the process that unpacks it was killed"}')
    os.waitpid(pid, 0)
    if "error" in answer:
        raise ConfigError(f"{what} cannot be unpacked: {answer['error']}")
    return str(answer["result"])


def _answer(writing: int, rootfs: str, work: Callable[[], str]) -> None:
    """Run in the child; never returns."""
    try:
        os.umask(0)
        _take_box_ids(id_mode(), rootfs)
        os.chroot(".")
        answer = {"result": work()}
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        answer = {"error": str(error) or type(error).__name__}
    except BaseException as error:  # the child must end here after any error, because the parent's code follows
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        os.write(writing, json.dumps(answer).encode())
    finally:
        sys.stdout.flush()
        os._exit(0)


def _take_box_ids(mode: IdMode, rootfs: str) -> None:
    """Work in `rootfs`, as root of a box's ids unless this process is the machine's root."""
    enter_own_namespaces(mode)
    os.chdir(rootfs)
    if mode.first_id is not None:
        os.chown(".", mode.first_id, mode.first_id)
        setns(make_user_namespace(mode.first_id, mode.num_ids), CLONE_NEWUSER)
        change_user(mode.num_ids)


class _Hashed:
    """A stream that computes the digest of the bytes read from it."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._sum = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        data = self._stream.read(num_bytes)
        self._sum.update(data)
        return data

    def digest(self) -> str:
        """Digest of the whole stream, including bytes after the archive's end."""
        while self.read(_BUFFER_BYTES):
            pass
        return f"sha256:{self._sum.hexdigest()}"


def _unpack_layer(stream: io.BufferedReader) -> str:
    hashed = _Hashed(decompressed(stream))
    with tarfile.open(fileobj=hashed, mode="r|", bufsize=_BUFFER_BYTES) as archive:  # type: ignore[call-overload]
        fresh: set[str] = set()
        for member in archive:
            _put(archive, member, fresh)
            archive.members = []  # a stream is read once; kept members would grow with the image
    return hashed.digest()


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, fresh: set[str]) -> None:
    """Unpack one entry of a layer. `fresh` holds the paths that this layer has written so far, with their parents."""
    path = os.path.normpath("/" + member.name)
    parent, name = os.path.split(path)
    if name == _OPAQUE:
        _clear(parent, fresh)
    elif name.startswith(_WHITEOUT):
        hidden = os.path.join(parent, name.removeprefix(_WHITEOUT))
        if not name.startswith(_META) and hidden not in fresh:
            _remove(hidden)
    elif path != "/" and not (member.ischr() or member.isblk()):
        os.makedirs(parent, 0o755, exist_ok=True)
        if not (member.isdir() and _is_real_directory(path)):
            _remove(path)
        _make(archive, member, path)
        while path not in fresh and path != "/":
            fresh.add(path)
            path = os.path.dirname(path)


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    if member.islnk():
        os.link(os.path.normpath("/" + member.linkname), path, follow_symlinks=False)
        return
    if member.issym():
        os.symlink(member.linkname, path)
    elif member.isdir():
        os.makedirs(path, exist_ok=True)
    elif member.isfifo():
        os.mkfifo(path)
    else:
        _write(archive, member, path)
    os.chown(path, _owner(member.uid), _owner(member.gid), follow_symlinks=False)
    if not member.issym():
        os.chmod(path, stat.S_IMODE(member.mode))  # after chown, which clears set-id bits
    os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)  # byte code is valid for one time stamp only


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    content = archive.extractfile(member)
    if content is None:
        raise ValueError(f"{member.name} is of a kind that is not known ({member.type!r})")
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file, _BUFFER_BYTES)


def _owner(number: int) -> int:
    """Map ids beyond the box's range to nobody's id, and in a box with one id all to root's."""
    num_ids = id_mode().num_ids
    return number if 0 <= number < num_ids else min(_NOBODY, num_ids - 1)


def _is_real_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _remove(path: str) -> None:
    if _is_real_directory(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _clear(directory: str, fresh: set[str]) -> None:
    """Remove what lower layers put there, at any depth."""
    if not _is_real_directory(directory):
        return
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if path not in fresh:
            _remove(path)
        else:
            _clear(path, fresh)


def _complete(workdir: str) -> str:
    """Add what runtimes add to every image: mount points, `localhost`, working directory, PATH of login shells. Return
    the text of its scripts."""
    os.chmod("/", 0o755)
    for path in ("/dev", "/proc", "/etc"):
        os.makedirs(path, 0o755, exist_ok=True)
    if not os.path.lexists("/tmp"):
        os.mkdir("/tmp", 0o1777)
    if os.path.isabs(workdir):
        os.makedirs(workdir, 0o755, exist_ok=True)
    _write_missing("/etc/hosts", _HOSTS)
    if os.path.exists("/etc/profile"):
        os.makedirs("/etc/profile.d", 0o755, exist_ok=True)
        _write_missing(_PROFILE_SCRIPT, _PROFILE)
    texts = []
    for path in (path for pattern in _SCRIPTS for path in sorted(glob.glob(pattern)) if os.path.isfile(path)):
        with open(path, errors="replace") as script:
            texts.append(script.read(_MAX_SCRIPT_CHARACTERS))
    return "\n".join(texts)


def read_scripts(text: str, env: dict[str, str]) -> list[str]:
    """Add the assignments of scripts that need no shell, since nothing of an image is run; return the other lines."""
    left_out, depth = list[str](), 0
    for line in (line.strip() for line in text.replace("\\\n", "").splitlines()):
        if not line or line.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(line) if len(line) <= _MAX_LINE_CHARACTERS else None
        if match and not depth and (match[1] or match[2] in {"PATH", *env}):
            value = env.get(match[2]) if match[3] is not None else None
            value = value or _expand(match[2], match[3] or match[4] or "", env)
            if value is not None:
                env[match[2]] = value
                continue
        left_out.append(line)
        words = line.replace(";", " ").split()
        depth += sum(word in _BLOCK_BEGINS for word in words) - sum(word in _BLOCK_ENDS for word in words)
        depth = max(0, depth + line.count('"') % 2 + line.count("'") % 2)  # a quoted end of line
    return left_out


def _expand(name: str, written: str, found: Mapping[str, str]) -> str | None:
    """Return a value as a shell reads it; None if it refers to what the image does not set."""
    match = _VALUE.fullmatch(written)
    if match is None or match[1] is not None:
        return match and match[1]
    known = {name: "", "PATH": SYSTEM_PATH, **found}
    try:
        return _EXPANSION.sub(lambda part: part[1] or known[part[2] or part[3]], match[2] or match[3] or "")
    except KeyError:
        return None


def _write_missing(path: str, text: str) -> None:
    try:
        if os.path.getsize(path):
            return
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    _remove(path)
    with open(path, "x") as file:
        file.write(text)
    os.chmod(path, 0o644)
