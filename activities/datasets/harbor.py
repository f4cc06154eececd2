"""Dataset format: Harbor task directories with `instruction.md`, `task.toml`, `tests/test.sh` and `solution/`.

The tests travel in the row and are put into the grading box only. The image is `environment.docker_image` or
`environment.image` of task.toml; without one it is built from the folder `environment` with its Dockerfile.
`test.sh` runs from `/tests`, as the task's user or the run's; the verdict is its reward file
(`grading/reward_file.py`). `solution/` makes the gold patch at admission. A part of task.toml that no box here provides
is a Problem; what a run's settings have to provide is `metadata.needed_settings`.
"""

import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from activities.datasets.archives import File, pack_archive
from activities.datasets.base import Problem, RawRow, check_variable_name
from grading.reward_file import HARBOR
from ratchet.config import DatasetConfig
from sandboxes.build_context import BUILD_CONTEXT, DOCKERFILE, BuildContext, pack_build_context

_NEEDS = {
    "verifier.timeout_sec": "limits.eval_seconds",
    "agent.timeout_sec": "limits.agent_seconds",
    "environment.memory_mb": "sandbox.memory_mib",
    "environment.cpus": "sandbox.cpus",
}
_NOT_PROVIDED = {
    "steps": "tasks of several steps",
    "environment.gpus": "GPUs in boxes",
    "environment.tpu": "TPUs in boxes",
    "environment.mcp_servers": "MCP servers",
    "environment.skills_dir": "skills",
    "environment.healthcheck": "services that have to be healthy first",
    "verifier.environment": "a verifier with an image of its own",
    "verifier.collect": "commands between agent and verifier",
}
_INSTALLS = re.compile(
    r"\b(?:uvx|uv (?:pip|run|sync|tool)|curl|wget|npx|pnpm dlx|bunx|git clone|go (?:get|mod download)|cargo fetch"
    r"|(?:apt(?:-get)?|apk|dnf|yum|pip3?|pipx|conda|mamba|poetry|npm|pnpm|yarn|bun|gem|bundle|composer)"
    r"(?: -\S+(?: [^-\s]\S*)?)*? (?:ci|i|install|add|update))\b(?![^;&|\n]*(?: --?offline\b| --no-index\b))"
)
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_CANARY = re.compile(r"\A(?:(?:<!--.*canary.*-->|#.*canary.*)\n+)+", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([GMK])(?:i?B|i)?", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\{?[A-Za-z_]")
_NETWORK_MODES = ("no-network", "public", "allowlist")


def is_harbor_task(path: Path) -> bool:
    return (path / "task.toml").is_file() or ((path / "instruction.md").is_file() and (path / "tests").is_dir())


def read_harbor(path: Path, dataset: DatasetConfig) -> Iterator[RawRow | Problem]:
    """Yield one row per task directory; `path` may be a task itself."""
    directories = [path] if is_harbor_task(path) else sorted(filter(is_harbor_task, path.iterdir()))
    for number, directory in enumerate(directories, 1):
        try:
            yield RawRow(number, directory.name, None, _metadata(directory), str(directory))
        except _WrongTaskError as error:
            file, field, message = error.args
            yield Problem(str(directory / file), number, field, message)
    if not directories:
        yield Problem(str(path), 0, "", "expected Harbor task directories (instruction.md, tests/), found none")


class _WrongTaskError(Exception):
    """A task that cannot be used. Arguments: file in its directory, field, reason."""


def _metadata(directory: Path) -> dict[str, Any]:
    settings = _settings(directory)
    environment = settings["environment"]
    if composed := next((path.name for path in sorted((directory / "environment").glob("*compose*.y*ml"))), None):
        raise _WrongTaskError("environment", "", f"boxes do not provide the containers of a compose file ({composed})")
    built: BuildContext | None = None
    image = environment.get("docker_image") or environment.get("image")
    if not image:
        try:
            built = _build_context(directory / "environment")
        except ValueError as error:
            raise _WrongTaskError("environment", "environment.docker_image", str(error)) from None
        image = built.image
    script = _text(directory, "tests/test.sh")
    own_workdir = built.workdir if built is not None else None
    files = _files(directory, "tests")
    helpers = [file.content.decode(errors="replace") for path, file in files.items() if path.endswith((".sh", ".bash"))]
    metadata = {
        "image": image,
        "workdir": str(environment.get("workdir") or settings.get("workdir") or own_workdir or "/app"),
        "problem_statement": _CANARY.sub("", _text(directory, "instruction.md")),
        "test_files": list(files),
        "tests_archive": pack_archive({**files, "tests/test.sh": File(script.encode(), executable=True)}),
        "eval_cmd": _command("/tests/test.sh", settings, "verifier"),
        "verifier": HARBOR,
        "needed_settings": _needs(settings, _COMMENT.sub("", "\n".join(helpers))),
    }
    if own := _variables(settings, "environment"):
        metadata["agent_environment"] = own
    if (user := settings["agent"].get("user")) is not None:
        metadata["agent_user"] = str(user)
    if (user := settings["verifier"].get("user")) is not None and not _is_root(user):
        metadata["tests_user"] = str(user)
    if permitted := _environment_network(settings):
        metadata["permitted_network"] = permitted
    if built is not None:
        metadata[BUILD_CONTEXT] = built.archive
    if (directory / "solution" / "solve.sh").is_file():
        metadata["solution_archive"] = pack_archive(_files(directory, "solution"))
        metadata["solution_cmd"] = _command("bash /solution/solve.sh", settings, "solution")
    return metadata


def _settings(directory: Path) -> dict[str, Any]:
    """Read task.toml, in which each section is a table then, and refuse what no box provides."""
    text = _text(directory, "task.toml") if (directory / "task.toml").is_file() else ""
    try:
        settings: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _WrongTaskError("task.toml", "", f"is not TOML in UTF-8: {error}") from None
    for section in ("environment", "verifier", "agent", "solution"):
        if not isinstance(settings.setdefault(section, {}), dict):
            found = type(settings[section]).__name__
            raise _WrongTaskError("task.toml", section, f"expected a table, found {found}")
    refused = {key: what for key, what in _NOT_PROVIDED.items() if _value(settings, key)}
    if str(_value(settings, "environment.os") or "linux").lower() != "linux":
        refused["environment.os"] = "other systems than Linux"
    if _choice(settings, "verifier.environment_mode", ("shared", "separate")) == "separate":
        refused["verifier.environment_mode"] = _NOT_PROVIDED["verifier.environment"]
    if refused:
        raise _WrongTaskError("task.toml", ", ".join(refused), f"boxes do not provide {', '.join(refused.values())}")
    return settings


def _value(settings: Mapping[str, Any], key: str) -> Any:
    section, _, field = key.rpartition(".")
    return (settings[section] if section else settings).get(field)


def _choice(settings: Mapping[str, Any], key: str, known: tuple[str | bool, ...]) -> Any:
    """Return a value that is one of the known ones, or None if it is not set."""
    value = _value(settings, key)
    if value is not None and value not in known:
        listed = ", ".join(str(one).lower() for one in known)
        raise _WrongTaskError("task.toml", key, f"expected one of {listed}, found {value!r:.60}")
    return value


def _needs(settings: Mapping[str, Any], script: str) -> dict[str, Any]:
    """Return what the settings of a run have to provide, by their names."""
    found: dict[str, Any] = {}
    for key, name in _NEEDS.items():
        value = _value(settings, key)
        if value is None and name == "sandbox.memory_mib":
            value = _mebibytes(_value(settings, "environment.memory"))
        if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise _WrongTaskError("task.toml", key, f"expected a number above 0, found {value!r:.60}")
        if value is not None:
            found[name] = value
    if roles := _open_roles(settings, script):
        found["sandbox.network"] = roles
    if _is_root(_value(settings, "verifier.user")):
        found["grading.user"] = "root"
    return found


def _is_root(user: Any) -> bool:
    return str(user) in ("root", "0")


def _mebibytes(size: Any) -> float | None:
    """Return the value of `memory`, as which first versions of the format write `memory_mb`; None without one."""
    if size is None:
        return None
    if match := _SIZE.fullmatch(str(size)):
        return float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()]
    raise _WrongTaskError("task.toml", "environment.memory", f"expected a size such as '2G', found {size!r:.60}")


def _open_roles(settings: Mapping[str, Any], script: str) -> list[str]:
    """Return the roles of the boxes that need an open network, because their section says so or the tests install.

    That of the environment, which the format's own template opens, is a permission.
    """
    agent, verifier = (
        _choice(settings, f"{section}.network_mode", _NETWORK_MODES) for section in ("agent", "verifier")
    )
    closed = (None, "no-network")
    roles = ["agent"] if agent not in closed else []
    mode = verifier or _environment_network(settings)
    if verifier not in closed or (mode != "no-network" and _INSTALLS.search(script)):
        roles.append("grade")
    return roles


def _environment_network(settings: Mapping[str, Any]) -> str | None:
    """Return the network mode that the environment's section permits, None if it says nothing."""
    mode: str | None = _choice(settings, "environment.network_mode", _NETWORK_MODES)
    allowed = _choice(settings, "environment.allow_internet", (True, False))
    return mode or (None if allowed is None else "public" if allowed else "no-network")


def _command(command: str, settings: Mapping[str, Any], section: str) -> str:
    """Return the command with the variables of the environment and of its section."""
    variables = _variables(settings, "environment") | _variables(settings, section)
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    # By bash, which runs a file without a shebang itself; `env` would leave it to sh.
    return " ".join(["env", *words, "bash", "-c", shlex.quote(command)] if words else [command])


def _variables(settings: Mapping[str, Any], section: str) -> dict[str, str]:
    variables = settings[section].get("env", {})
    if not isinstance(variables, dict):
        raise _WrongTaskError("task.toml", f"{section}.env", f"expected a table, found {type(variables).__name__}")
    for name, value in variables.items():
        try:
            check_variable_name(name)
            if type(value) not in (str, int, float):
                raise ValueError(f"expected a string or a number, found {value!r:.60}")
            if _REFERENCE.search(str(value)):
                raise ValueError(f"boxes get no variables of this host; write the value in place of {value!r:.60}")
        except ValueError as error:
            raise _WrongTaskError("task.toml", f"{section}.env.{name}", str(error)) from None
    return {name: str(value) for name, value in variables.items()}


def _text(directory: Path, name: str) -> str:
    try:
        return _own(directory, directory / name).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise _WrongTaskError(name, "", f"is not UTF-8: {error.reason}") from None
    except FileNotFoundError:
        raise _WrongTaskError("", name, "expected a file, found nothing") from None
    except OSError as error:
        raise _WrongTaskError(name, "", f"expected a file that can be read, found: {error.strerror}") from None


def _own(directory: Path, path: Path) -> Path:
    """Return a path of the task. Raises _WrongTaskError for one that leads to another file of this machine."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
        name = path.relative_to(directory).as_posix()
        raise _WrongTaskError(name, "", "is a link that leads out of the task; put a copy of the file in its place")
    return path


def _files(directory: Path, folder: str) -> dict[str, File]:
    return {
        path.relative_to(directory).as_posix(): File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in sorted((directory / folder).rglob("*"))
        if _own(directory, path).is_file()
    }


def _build_context(directory: Path) -> BuildContext:
    """Return what the task's image is built from. Raises ValueError if it cannot be built."""
    if not (directory / DOCKERFILE).is_file():
        raise ValueError("expected an image reference in task.toml or environment/Dockerfile, found neither")
    return pack_build_context(directory)
