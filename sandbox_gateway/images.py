"""Image references, and the file tree of a box for each of them. A new kind of image is a new branch of
`Catalogue.plan`; boxd only gets mounts and directories."""

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox_gateway.image_store import BUILT_IN_REFERENCES, ROOTFS, ImageStore, read_facts
from sandbox_gateway.wire_errors import RefusalError

AGENT_UID = 1000
_TOP_LEVEL = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_COPIED = (
    "alternatives", "bash.bashrc", "ca-certificates.conf", "debian_version", "gai.conf", "host.conf", "inputrc",
    "java-17-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "login.defs", "magic", "mime.types",
    "netconfig", "nsswitch.conf", "os-release", "pam.conf", "pam.d", "perl", "protocols", "rpc", "security", "services",
    "shells", "skel", "ssl", "terminfo", "timezone", "xattr.conf",
)  # fmt: skip
"""Files that programs need to run; none that names users, hosts, keys or this machine's package sources."""
_NUM_NAMED_MAX = 20

_PASSWD = (
    "root:x:0:0:root:/root:/bin/bash\n"
    f"agent:x:{AGENT_UID}:{AGENT_UID}:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
_GROUP = f"root:x:0:\ntty:x:5:\nstaff:x:50:\nusers:x:100:\nagent:x:{AGENT_UID}:\nnogroup:x:65534:\n"
_SHADOW = "root:*:19000:0:99999:7:::\nagent:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n"
_HOSTS = "127.0.0.1\tlocalhost box\n::1\tlocalhost\n"
_PROFILE = """\
# Login shells of other systems reset PATH here; a box keeps what its supervisor set.
PATH="${RATCHET_PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
export PATH
for part in /etc/profile.d/*.sh; do
  [ -r "$part" ] && . "$part"
done
unset part
"""
_ROOTS_DIRECTORIES = ("", "/dev", "/etc", "/home", "/mnt", "/opt", "/run", "/srv", "/usr", "/var", "/workspace")
_HOST_DIRECTORIES = [
    *((path, 0, 0o755) for path in _ROOTS_DIRECTORIES),
    ("/home/agent", AGENT_UID, 0o755),
    ("/proc", 0, 0o555),
    ("/root", 0, 0o700),
    ("/tmp", 0, 0o1777),
    ("/var/tmp", 0, 0o1777),
]


@dataclass(frozen=True, slots=True)
class RootPlan:
    """The file tree of a box; the fields are those of `BoxSpec`."""

    binds: list[tuple[str, str]]
    owned_directories: list[tuple[str, int, int]]
    links: dict[str, str] = field(default_factory=dict)
    lower: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    default_user: str = "root"


class Catalogue:
    """The images of boxes. `state`: /etc of the host image, an empty directory. `images`: read for every create."""

    def __init__(
        self, state: Path, images: ImageStore | None, layers: Mapping[str, Path], hidden: tuple[Path, ...]
    ) -> None:
        self._images = images
        self._layers = [(str(source.resolve(strict=True)), target) for target, source in sorted(layers.items())]
        self.extra_path = [f"{target}/bin" for source, target in self._layers if os.path.isdir(f"{source}/bin")]
        self._host = _plan_host(state, hidden)

    def plan(self, reference: str) -> RootPlan:
        """Return the tree of an image. Raises RefusalError(404) for an unknown reference: a create never pulls."""
        imported = self._images.find(reference) if self._images is not None else None
        if reference in BUILT_IN_REFERENCES:
            plan = self._host
        elif imported is not None:
            plan = _plan_directory(imported)
        else:
            raise RefusalError(404, self._unknown(reference))
        return replace(plan, binds=[*plan.binds, *self._layers])

    def _unknown(self, reference: str) -> str:
        images = self._images.images() if self._images is not None else []
        known = [*BUILT_IN_REFERENCES, *(image.reference for image in images[:_NUM_NAMED_MAX])]
        more = f" and {len(images) - _NUM_NAMED_MAX} more" if len(images) > _NUM_NAMED_MAX else ""
        return (
            f"template '{reference[:200]}' not found; this gateway has {', '.join(known)}{more}. "
            "`ratchet tasks images import` adds a directory, tar, OCI archive, docker-archive or SIF file; nothing "
            "is pulled"
        )


def _plan_host(state: Path, hidden: tuple[Path, ...]) -> RootPlan:
    """Plan the machine's own programs, a generated /etc, and private directories for the rest."""
    etc, empty = _generate_etc(state), state / "empty"
    empty.mkdir(exist_ok=True)
    binds, links = [("/usr", "/usr"), (str(etc), "/etc")], dict[str, str]()
    for name in _TOP_LEVEL:
        path = Path("/") / name
        if path.is_symlink():
            links[str(path)] = os.readlink(path)
        elif path.is_dir():
            binds.append((str(path), str(path)))
    for directory in (*hidden, state):
        resolved = directory.resolve()
        if resolved.is_relative_to("/usr") and resolved.is_dir():
            binds.append((str(empty), str(resolved)))
    return RootPlan(binds, _HOST_DIRECTORIES, links)


def _plan_directory(directory: Path) -> RootPlan:
    """Plan an imported image: its tree, and the env, workdir and user of its config."""
    rootfs, facts = directory / ROOTFS, read_facts(directory)
    return RootPlan(
        binds=[],
        owned_directories=[("/proc", 0, 0o555), ("/dev", 0, 0o755)],
        lower=str(rootfs.resolve()),
        env=facts.env,
        workdir=facts.workdir,
        default_user=facts.user or "root",
    )


def _generate_etc(state: Path) -> Path:
    """Make the host image's /etc in a directory named by its content: boxes of earlier gateways keep theirs."""
    sources = [Path("/etc") / name for name in _ETC_COPIED]
    generated = {
        "passwd": _PASSWD,
        "group": _GROUP,
        "shadow": _SHADOW,
        "hosts": _HOSTS,
        "hostname": "box\n",
        "profile": _PROFILE,
        "resolv.conf": "",
    }
    facts = [(str(path), path.stat().st_mtime_ns) for path in sources if path.exists()]
    target = state / f"host-etc-{hashlib.sha256(repr((facts, generated)).encode()).hexdigest()[:16]}"
    if target.exists():
        return target
    fresh = target.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for source in sources:
        _copy_entry(source, fresh / source.name)
    for name, text in generated.items():
        (fresh / name).write_text(text)
    (fresh / "profile.d").mkdir()
    (fresh / "mtab").symlink_to("../proc/self/mounts")
    return fresh.rename(target)


def _copy_entry(source: Path, target: Path) -> None:
    """Copy what every user of the machine may read: the box's root could read the rest, such as keys, in a copy."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, ignore=_unreadable_names)
    elif source.is_symlink() and not source.resolve().is_relative_to("/etc"):
        target.symlink_to(os.readlink(source))
    elif source.exists() and not _unreadable_names(str(source.parent), [source.name]):
        shutil.copy2(source, target)


def _unreadable_names(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not os.stat(f"{directory}/{name}", follow_symlinks=False).st_mode & stat.S_IROTH]
