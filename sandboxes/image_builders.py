"""Build an image from a Dockerfile for the boxes of a service: in a Docker daemon, or for the local gateway.

The gateway has no builder of its own. A program that builds images on this machine does it, and the result is imported
as `ratchet tasks images import` does.
"""

import asyncio
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.errors import BuildFailedError, ConfigError, SandboxBusyError
from sandbox_gateway.image_store import ImageStore
from sandboxes.build_context import DOCKERFILE, unpack_build_context

if TYPE_CHECKING:
    from aiodocker.exceptions import DockerError

_PROGRAMS = ("docker", "podman", "buildah")
_END_SECONDS = 10.0
_AWAY_SECONDS, _MAX_CHARS = 30.0, 300
_FAILED_STEP = re.compile(r"returned a non-zero code: \d+|did not complete successfully: exit code: \d+")
_OUTAGE = re.compile(
    r"toomanyrequests|rate limit|time-?out|timed out|no such host|server misbehaving|temporary failure"
    r"|no space left|disk quota|read-only file system|input/output error|too many open files|cannot allocate memory"
    r"|connection (refused|reset)|broken pipe|unreachable|unavailable|error during connect|\bEOF\b|\bTLS\b|x509"
    r"|failed to create endpoint|\b5\d\d (Internal|Bad|Service|Gateway)|unexpected (HTTP )?status.*\b(429|5\d\d)\b",
    re.IGNORECASE,
)
"""Errors of the disk, the network, a registry or the daemon. Every other error that ends a build is the Dockerfile's,
its context's or its base image's: it ends the build with its text, and the build is tried again later."""


class DockerImageBuilder:
    """Builds in the Docker daemon that runs the boxes. `url` None: DOCKER_HOST, else the local socket."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url

    async def build(self, image: str, context: bytes, on_lines: Callable[[str], None]) -> None:
        import aiodocker
        import aiohttp
        from aiodocker.exceptions import DockerError

        try:
            async with aiodocker.Docker(url=self._url) as client:
                lines = client.images.build(fileobj=io.BytesIO(context), encoding="gzip", tag=image, stream=True)
                async for line in lines:
                    on_lines(str(line.get("stream") or line.get("status") or ""))
        except DockerError as error:
            if not _is_builds_fault(error):
                raise SandboxBusyError(f"the Docker daemon cannot build {image} now: {error.message}") from error
            on_lines(error.message)
            raise BuildFailedError(f"Docker cannot build {image}") from error
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:  # ValueError: there is no socket
            raise SandboxBusyError(f"there is no Docker daemon to build {image}: {error}") from error


def _is_builds_fault(error: "DockerError") -> bool:
    """Return whether a step, the Dockerfile or its base image is wrong; else the daemon, a registry or the way to it
    fails.

    Steps fail in the stream of lines, in which outages come, too. A Dockerfile that cannot be read is refused before.
    """
    from aiodocker.exceptions import DockerStreamError

    if isinstance(error, DockerStreamError):
        return bool(_FAILED_STEP.search(error.message)) or not _OUTAGE.search(error.message)
    is_page = error.message.lstrip().startswith("<")
    return error.status in (400, 404) and not is_page


class LocalImageBuilder:
    """Builds with docker, podman or buildah of this machine, and imports the result for the local gateway's boxes."""

    def __init__(self, images: Path) -> None:
        self._store = ImageStore(images)

    async def build(self, image: str, context: bytes, on_lines: Callable[[str], None]) -> None:
        program = await _find_program(image)
        with tempfile.TemporaryDirectory(prefix="ratchet-build-") as name:
            directory, archive = Path(name) / "context", Path(name) / "image.tar"
            await asyncio.to_thread(unpack_build_context, image, context, directory)
            try:
                await _run([program, "build", "-t", image, "-f", str(directory / DOCKERFILE), str(directory)], on_lines)
            except BuildFailedError:
                await _find_program(image)
                raise
            await _run(_save(program, image, archive), on_lines)
            try:
                await asyncio.to_thread(self._store.add, archive, image, on_lines)
            except ConfigError as error:
                raise BuildFailedError(f"the image that {program} has built cannot be imported: {error}") from error


async def _find_program(image: str) -> str:
    """Return the first program that is able to build. Raises SandboxBusyError if none is: its daemon may be away."""
    answers: list[str] = []
    for program in filter(shutil.which, _PROGRAMS):
        said: list[str] = []
        try:
            await _run([program, "info"], said.append)
            return program
        except BuildFailedError:
            answers.append(f"{program} says: {' '.join(' '.join(said).split())[-_MAX_CHARS:]}")
    raise SandboxBusyError(
        f"image {image} has to be built from a Dockerfile, and none of {', '.join(_PROGRAMS)} can do it here now; "
        f"install one (Debian: `apt-get install buildah`). {'; '.join(answers)}".rstrip(),
        _AWAY_SECONDS,
    )


def _save(program: str, image: str, archive: Path) -> list[str]:
    if program == "buildah":
        return [program, "push", image, f"docker-archive:{archive}:{image}"]
    return [program, "save", "-o", str(archive), image]


async def _run(command: Sequence[str], on_lines: Callable[[str], None]) -> None:
    """Run a command to its end, which a cancelled task does not outlive. Raises BuildFailedError."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        while chunk := await process.stdout.read(1 << 16):
            on_lines(chunk.decode(errors="replace"))
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
    if status != 0:
        raise BuildFailedError(f"`{' '.join(command[:2])}` has ended with status {status}")
