"""A provider made of one class of the user's: `exec`, `write_file`, `read_file` and `async with` are enough.

The class is made with the image's name. It may have more, and each adds one thing: a class method `connect(id)` and an
attribute `sandbox_id`: boxes outlive their worker; `list()` beside them, which returns ids: boxes without an owner are
found; a method `set_ttl(seconds)`: boxes end by themselves; a parameter `network` of the class, a value of
`sandboxes.base.Network`: the network is closed; a method `set_network(network)` beside it, True or False: it is open
for `pre_commands` alone.
"""

import asyncio
import inspect
import json
import shlex
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ratchet.errors import CommandFailedError, ConfigError, RatchetError, SandboxBusyError, SandboxGoneError
from sandboxes.base import OPEN_NETWORK, BoxLimits, Capabilities, Command, CommandResult, Network, Sandbox, SandboxInfo

_UNLIMITED_SECONDS = 30 * 86_400
_LATE_SECONDS = 10.0
_KILL_TRIES = 5  # after which a box that runs no command is taken for gone; before, its service may be away
_MISSING = 3
_RECORD = "/var/tmp/.ratchet-box.json"
"""File in a box with its metadata, for classes whose boxes outlive their worker."""


class ClassProvider:
    """Creates boxes by `async with kind(image)`, which this process keeps open. `name`: import path of the class."""

    def __init__(self, kind: type[Any], name: str, max_ttl_seconds: int = 86_400) -> None:
        self.name = name
        self._kind = kind
        self._has_network = "network" in inspect.signature(kind).parameters
        self._boxes: dict[str, ClassSandbox] = {}
        self._by_key: dict[str, asyncio.Task[ClassSandbox]] = {}
        present = {
            "`connect`": hasattr(kind, "connect"),
            "`list`": hasattr(kind, "list"),
            "`set_ttl`": hasattr(kind, "set_ttl"),
            "parameter `network`": self._has_network,
        }
        lost = (
            "the death of a worker loses its boxes, and only one worker process may run",
            "a box whose owner was killed is not found and not ended",
            "no box ends by itself",
            OPEN_NETWORK,
        )
        self.capabilities = Capabilities(
            pause=False,
            network_policy=self._has_network,
            limits=False,
            max_ttl_seconds=max_ttl_seconds,
            without=tuple(
                f"{words} (no {method})"
                for (method, there), words in zip(present.items(), lost, strict=True)
                if not there
            ),
        )

    async def create(
        self,
        image: str,
        *,
        ttl_seconds: int,
        metadata: Mapping[str, str],
        idempotency_key: str,
        network: Network = True,
        limits: BoxLimits | None = None,
    ) -> "ClassSandbox":
        if limits not in (None, BoxLimits()):
            raise ConfigError(f"sandbox.memory_mib, cpus and max_processes: {self.name} cannot limit a box")
        if network not in (True, False, "open"):  # OpenedFirst
            if not self._has_network or not hasattr(self._kind, "set_network"):
                missing = f"{self.name} has no `network` and `set_network`"
                raise ConfigError(f"sandbox.network: pre_commands: {missing}; add them, or leave pre_commands out")
            network = "open"
        if (making := self._by_key.get(idempotency_key)) is None:
            options = {"network": network} if self._has_network else {}
            making = asyncio.ensure_future(self._make(image, options, dict(metadata), idempotency_key))
            making.add_done_callback(lambda one: one.exception() and self._by_key.pop(idempotency_key, None))
            self._by_key[idempotency_key] = making
        box = await asyncio.shield(making)
        await box.set_ttl(ttl_seconds)
        return box

    async def _make(self, image: str, options: Mapping[str, Any], metadata: dict[str, str], key: str) -> "ClassSandbox":
        try:
            made = await self._kind(image, **options).__aenter__()
        except RatchetError:
            raise
        except Exception as error:
            raise SandboxBusyError(f"{self.name} makes no box of {image}: {type(error).__name__}: {error}") from error
        box = ClassSandbox(self, str(getattr(made, "sandbox_id", "") or uuid.uuid4().hex), made)
        box.metadata = metadata
        box.key = key
        self._boxes[box.id] = box
        if hasattr(self._kind, "connect"):
            record = {"metadata": metadata, "started_at": box.started_at.isoformat()}
            await box.write_file(_RECORD, json.dumps(record))
        return box

    async def connect(self, sandbox_id: str) -> "ClassSandbox":
        if (known := self._boxes.get(sandbox_id)) is not None:
            return known
        if not hasattr(self._kind, "connect"):
            raise SandboxGoneError(f"box {sandbox_id} is not one of this process, and {self.name} has no `connect`")
        with _failures_mean_gone(sandbox_id):
            box = ClassSandbox(self, sandbox_id, await _awaited(self._kind.connect(sandbox_id)))
            record = json.loads(await box.read_file(_RECORD))
            box.metadata = record["metadata"]
            box.started_at = datetime.fromisoformat(record["started_at"])
        return self._boxes.setdefault(sandbox_id, box)

    async def kill(self, sandbox_id: str) -> bool:
        try:
            box = await self.connect(sandbox_id)
        except SandboxGoneError:
            return False
        async with box.ending:
            if self._boxes.get(sandbox_id) is not box:  # another call has ended it
                return False
            try:
                await box.made.__aexit__(None, None, None)
            except Exception as error:
                box.failed_kills += 1
                with suppress(SandboxGoneError, CommandFailedError):
                    if box.failed_kills >= _KILL_TRIES:
                        await box.exec("true", timeout=_LATE_SECONDS)
                    raise SandboxBusyError(f"box {sandbox_id} not ended: {type(error).__name__}: {error}") from error
            del self._boxes[sandbox_id]
            self._by_key.pop(box.key, None)
        return True

    async def describe(self, sandbox_id: str) -> SandboxInfo:
        box = await self.connect(sandbox_id)
        return SandboxInfo(box.id, box.metadata, box.started_at, "running")

    async def list(self, metadata: Mapping[str, str]) -> list[SandboxInfo]:
        others = await _awaited(self._kind.list()) if hasattr(self._kind, "list") else ()
        found = []
        for box_id in sorted({*self._boxes, *others}):
            try:
                found.append(await self.describe(box_id))
            except SandboxGoneError:  # it has ended meanwhile, or was not made by a provider like this
                continue
        return [info for info in found if info.carries(metadata)]

    async def close(self) -> None:
        """Do nothing: the boxes live on."""


class ClassSandbox(Sandbox):
    """A box of the user's class, with the rest of the contract done by its four methods."""

    id = ""

    def __init__(self, provider: ClassProvider, box_id: str, made: Any) -> None:
        self.id = box_id
        self.made = made
        self.metadata: dict[str, str] = {}
        self.key = ""
        self.ending = asyncio.Lock()
        self.failed_kills = 0
        self.started_at = datetime.now(UTC)
        self._provider = provider

    async def run(self, command: Command) -> CommandResult:
        lines = [f"export {name}={shlex.quote(value)}" for name, value in command.env.items()]
        enter = f"cd -- {shlex.quote(command.cwd)} || exit 126" if command.cwd else "cd ~ 2>/dev/null || cd /"
        script = "\n".join([*lines, enter, command.cmd])
        seconds = _UNLIMITED_SECONDS if command.timeout is None else command.timeout
        with _failures_mean_gone(self.id):
            try:
                async with asyncio.timeout(seconds + _LATE_SECONDS):
                    answer = await self.made.exec(script, user=command.user, check=False, timeout=seconds)
            except TimeoutError as error:
                raise CommandFailedError(command.cmd, None, "", "", timed_out=True) from error
            code, *texts = answer if isinstance(answer, tuple) else (answer.exit_code, answer.stdout, answer.stderr)
            words = (text.decode(errors="replace") if isinstance(text, bytes) else text for text in texts)
            result = CommandResult(int(code), *words)
        if command.on_stderr is not None and result.stderr:
            command.on_stderr(result.stderr)
        return result

    async def write_file(self, path: str, content: bytes | str | Path, *, user: str = "root") -> None:
        with _failures_mean_gone(self.id):
            await self.made.write_file(path, content, user=user)

    async def read_file(self, path: str, *, user: str = "root", max_bytes: int | None = None) -> bytes:
        quoted = shlex.quote(path)
        look = f"[ -e {quoted} ] || exit {_MISSING}; [ -f {quoted} ] && [ -r {quoted} ]"
        found = await self.exec(look, user=user, check=False)
        if found.exit_code == _MISSING:
            raise FileNotFoundError(f"read {path}")
        if found.exit_code != 0:
            raise CommandFailedError(f"read {path}", found.exit_code, "", "it is no file that the user may read")
        with _failures_mean_gone(self.id):
            data = await self.made.read_file(path, user=user)
        return (data.encode() if isinstance(data, str) else bytes(data))[:max_bytes]

    async def set_network(self, network: bool) -> None:
        with _failures_mean_gone(self.id):
            await _awaited(self.made.set_network(network))

    async def set_ttl(self, seconds: int) -> None:
        if hasattr(self.made, "set_ttl"):
            with _failures_mean_gone(self.id):
                await _awaited(self.made.set_ttl(seconds))

    async def kill(self) -> None:
        await self._provider.kill(self.id)


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


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
