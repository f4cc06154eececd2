"""A provider made of one class of the user's: `exec`, `write_file`, `read_file` and `async with` are enough.

The class is made with the image's name. It may have more, and each adds one thing: a class method `connect(id)` and an
attribute `sandbox_id`: boxes outlive their worker; `list()` beside them: boxes without an owner are found; a method
`set_ttl(seconds)`: boxes end without their worker; a parameter `network` of the class: the network is closed.
"""

import asyncio
import inspect
import json
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from ratchet.errors import CommandFailedError, ConfigError, RatchetError, SandboxBusyError, SandboxGoneError
from sandboxes.base import OPEN_NETWORK, BoxLimits, Capabilities, CommandResult, Sandbox, SandboxInfo

_log = structlog.get_logger(__name__)
_UNLIMITED_SECONDS = 30 * 86_400
_LATE_SECONDS = 10.0
_RECORD = "/var/tmp/.ratchet-box.json"
"""File in a box with its metadata, for classes whose boxes outlive their worker."""


@dataclass(slots=True)
class _Box:
    """A living box. `end`: ends it at its time to live."""

    id: str
    made: Any
    metadata: dict[str, str]
    started_at: datetime
    env: dict[str, str] = field(default_factory=dict)
    ends_at: datetime | None = None
    end: asyncio.TimerHandle | None = None


class ClassProvider:
    """Creates boxes by `async with kind(image)`, which this process keeps open. `name`: import path of the class."""

    def __init__(self, kind: type[Any], name: str, max_ttl_seconds: int = 86_400) -> None:
        self._kind = kind
        self._name = name
        self._boxes: dict[str, _Box] = {}
        self._by_key: dict[str, asyncio.Task[_Box]] = {}
        self._ends: set[asyncio.Task[bool]] = set()
        self._has_network = "network" in inspect.signature(kind).parameters
        self._capabilities = Capabilities(
            pause=False,
            network_policy=self._has_network,
            limits=False,
            max_ttl_seconds=max_ttl_seconds,
            without=tuple(self._missing()),
        )

    def _missing(self) -> Iterator[str]:
        if not hasattr(self._kind, "connect"):
            yield "the death of a worker loses its boxes, and only one worker process may run (no `connect`)"
        if not hasattr(self._kind, "list"):
            yield "a box whose owner was killed is not found and not ended (no `list`)"
        if not hasattr(self._kind, "set_ttl"):
            yield "a box ends at its time to live only while its worker runs (no `set_ttl`)"
        if not self._has_network:
            yield f"{OPEN_NETWORK} (no parameter `network`)"

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        env: Mapping[str, str] | None = None,
        network: bool = True,
        limits: BoxLimits | None = None,
    ) -> Sandbox:
        if limits not in (None, BoxLimits()):
            raise ConfigError(f"sandbox.memory_mib, cpus and max_processes: {self._name} cannot limit a box")
        making = self._by_key.get(idempotency_key)
        if making is None or (making.done() and (making.exception() or making.result().id not in self._boxes)):
            options = {"network": network} if self._has_network else {}
            making = asyncio.ensure_future(self._make(image, options, dict(metadata), dict(env or {})))
            self._by_key[idempotency_key] = making
            making.add_done_callback(lambda _: self._forget_ended())
        box = _ClassSandbox(self, await asyncio.shield(making))
        await box.set_ttl(ttl_seconds)
        return box

    async def _make(
        self, image: str, options: Mapping[str, Any], metadata: dict[str, str], env: dict[str, str]
    ) -> _Box:
        try:
            made = await self._kind(image, **options).__aenter__()
        except RatchetError:
            raise
        except Exception as error:
            raise SandboxBusyError(f"{self._name} makes no box of {image}: {type(error).__name__}: {error}") from error
        box_id = str(getattr(made, "sandbox_id", "") or uuid.uuid4().hex)
        box = self._boxes[box_id] = _Box(box_id, made, metadata, datetime.now(UTC), env)
        if hasattr(self._kind, "connect"):
            record = {"metadata": metadata, "started_at": box.started_at.isoformat(), "env": env}
            await _ClassSandbox(self, box).write_file(_RECORD, json.dumps(record))
        return box

    def _forget_ended(self) -> None:
        ended = [
            key
            for key, task in self._by_key.items()
            if task.done() and not task.cancelled() and not task.exception() and task.result().id not in self._boxes
        ]
        for key in ended:
            del self._by_key[key]

    async def box(self, box_id: str) -> _Box:
        """Return a box of this process, or connect to another one. Raises SandboxGoneError."""
        if (known := self._boxes.get(box_id)) is not None:
            return known
        if not hasattr(self._kind, "connect"):
            raise SandboxGoneError(
                f"box {box_id} is not one of this worker's process, and {self._name} has no `connect`"
            )
        with _failures_mean_gone(box_id):
            made = await _awaited(self._kind.connect(box_id))
            found = _Box(box_id, made, {}, datetime.now(UTC))
            record = json.loads(await _ClassSandbox(self, found).read_file(_RECORD))
        found.metadata, found.env = record["metadata"], record["env"]
        found.started_at = datetime.fromisoformat(record["started_at"])
        return self._boxes.setdefault(box_id, found)

    async def connect(self, sandbox_id: str) -> Sandbox:
        return _ClassSandbox(self, await self.box(sandbox_id))

    async def kill(self, sandbox_id: str) -> bool:
        try:
            box = await self.box(sandbox_id)
        except SandboxGoneError:
            return False
        if self._boxes.pop(sandbox_id, None) is None:
            return False
        if box.end is not None:
            box.end.cancel()
        try:
            await box.made.__aexit__(None, None, None)
        except Exception as error:
            _log.warning("box not ended", box=sandbox_id, reason=f"{type(error).__name__}: {error}")
        return True

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        box = await self.box(sandbox_id)
        return SandboxInfo(box.id, box.metadata, box.started_at, "running", box.ends_at)

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        ids = set(self._boxes)
        if hasattr(self._kind, "list"):
            ids |= set(await _awaited(self._kind.list()))
        found = []
        for box_id in sorted(ids):
            try:
                found.append(await self.describe(box_id))
            except SandboxGoneError:  # it has ended meanwhile, or is not one of ours
                continue
        return [info for info in found if info.carries(metadata)]

    def end_later(self, box: _Box, seconds: int) -> None:
        """End the box after so many seconds, if this process lives so long."""
        if box.end is not None:
            box.end.cancel()
        box.ends_at = datetime.now(UTC) + timedelta(seconds=seconds)
        box.end = asyncio.get_running_loop().call_later(seconds, self._end, box.id)

    def _end(self, box_id: str) -> None:
        task = asyncio.ensure_future(self.kill(box_id))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def close(self) -> None:
        """Do nothing: the boxes live on."""


class _ClassSandbox:
    """A handle on a box of the user's class, with the rest of the contract done by its four methods."""

    def __init__(self, provider: ClassProvider, box: _Box) -> None:
        self._provider = provider
        self._box = box

    @property
    def id(self) -> str:
        return self._box.id

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        check: bool = True,
        timeout: float | None = 60,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        on_stderr: Callable[[str], None] | None = None,
    ) -> CommandResult:
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in (self._box.env | dict(env or {})).items()
        )
        place = f"cd -- {shlex.quote(cwd)} || exit 126" if cwd else "cd ~ 2>/dev/null || cd /"
        seconds = _UNLIMITED_SECONDS if timeout is None else timeout
        with _failures_mean_gone(self.id):
            try:
                async with asyncio.timeout(seconds + _LATE_SECONDS):
                    answer = await self._box.made.exec(
                        f"{exports}{place}\n{cmd}", user=user, check=False, timeout=seconds
                    )
            except TimeoutError as error:
                raise CommandFailedError(cmd, None, "", "", timed_out=True) from error
            result = _result(answer)
        if on_stderr is not None and result.stderr:
            on_stderr(result.stderr)
        if check and result.exit_code != 0:
            raise CommandFailedError(cmd, result.exit_code, result.stdout, result.stderr)
        return result

    async def start_detached(
        self, cmd: str, *, user: str = "root", env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> None:
        detached = f"setsid nohup /bin/bash -l -c {shlex.quote(cmd)} >/dev/null 2>&1 </dev/null &"
        await self.exec(detached, user=user, env=env, cwd=cwd)

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        with _failures_mean_gone(self.id):
            await self._box.made.write_file(path, content, user=user)

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        quoted = shlex.quote(path)
        found = await self.exec(
            f"[ -e {quoted} ] || exit 3; [ -f {quoted} ] && [ -r {quoted} ]", user=user, check=False
        )
        if found.exit_code == 3:
            raise FileNotFoundError(f"read {path}")
        if found.exit_code != 0:
            raise CommandFailedError(
                f"read {path}", found.exit_code, found.stdout, "it is no file that the user may read"
            )
        with _failures_mean_gone(self.id):
            data = await self._box.made.read_file(path, user=user)
        return (data.encode() if isinstance(data, str) else bytes(data))[:max_bytes]

    async def fetch_file(self, path: str, target: Path, *, user: str = "root") -> None:
        await asyncio.to_thread(target.write_bytes, await self.read_file(path, user=user))

    async def set_ttl(self, seconds: int) -> None:
        if hasattr(self._box.made, "set_ttl"):
            with _failures_mean_gone(self.id):
                await _awaited(self._box.made.set_ttl(seconds))
        self._provider.end_later(self._box, seconds)

    async def kill(self) -> None:
        await self._provider.kill(self.id)

    async def close(self) -> None:
        """Do nothing: other stages use the same object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()


@contextmanager
def _failures_mean_gone(box_id: str) -> Iterator[None]:
    """Translate what the user's class raises. A box that fails is given up, because a class may fail for ever; the
    number of boxes of a rollout is limited."""
    try:
        yield
    except (RatchetError, FileNotFoundError):
        raise
    except Exception as error:
        raise SandboxGoneError(f"box {box_id}: {type(error).__name__}: {error}") from error


def _result(answer: Any) -> CommandResult:
    """Read what `exec` returned: (exit code, output, error output), or an object with these attributes."""
    if isinstance(answer, tuple):
        code, stdout, stderr = answer
    else:
        code, stdout, stderr = answer.exit_code, answer.stdout, answer.stderr
    return CommandResult(int(code), _text(stdout), _text(stderr))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
