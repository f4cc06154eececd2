"""Failures of a build: those of the Dockerfile, and those of the Docker daemon, which are waited for."""

import json
from base64 import b64decode
from pathlib import Path

import pytest

from ratchet.errors import BuildFailedError, SandboxBusyError
from sandboxes.build_context import DOCKERFILE, pack_build_context
from sandboxes.image_builders import DockerImageBuilder, LocalImageBuilder
from tests.standins.docker_daemon import DockerDaemonStandin

JSON = "application/json"


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, JSON, '{"message": "driver failed: no space left on device"}'),
        (502, "text/html", "<html>bad gateway</html>"),
        (503, JSON, '{"message": "shutting down"}'),
        (403, "text/html", "<html>sign in</html>"),
        (400, "text/html", "<!doctype html><html>proxy</html>"),
        (429, JSON, '{"message": "too many requests"}'),
    ],
)
async def test_a_daemon_that_cannot_build_now_is_waited_for(status: int, kind: str, body: str) -> None:
    async with DockerDaemonStandin() as daemon:
        daemon.refusal = (status, kind, body)
        with pytest.raises(SandboxBusyError, match="cannot build x now"):
            await DockerImageBuilder(daemon.url).build("x", b"", lambda line: None)


def in_stream(message: str) -> str:
    """Return what a daemon sends if a build that it has begun fails."""
    lines = [{"stream": "Step 1/2 : FROM x"}, {"errorDetail": {"message": message}, "error": message}]
    return "".join(json.dumps(line) + "\r\n" for line in lines)


@pytest.mark.parametrize(
    "message",
    [
        "toomanyrequests: You have reached your pull rate limit",
        'Get "https://registry-1.docker.io/v2/": net/http: TLS handshake timeout',
        'Get "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io on 10.0.0.2:53: no such host',
        "write /var/lib/docker/tmp/GetImageBlob1: no space left on device",
        'Get "https://registry-1.docker.io/v2/": dial tcp 1.2.3.4:443: i/o timeout',
        "received unexpected HTTP status: 503 Service Unavailable",
        "failed to solve: failed to do request: Head https://x/v2/y/manifests/1: 502 Bad Gateway: not found",
        "error during connect: EOF",
        "toomanyrequests: access denied until tomorrow",
        "failed to create endpoint: permission denied",
    ],
)
async def test_an_outage_in_the_stream_of_a_build_is_waited_for(message: str) -> None:
    async with DockerDaemonStandin() as daemon:
        daemon.refusal = (200, JSON, in_stream(message))
        with pytest.raises(SandboxBusyError, match="cannot build x now"):
            await DockerImageBuilder(daemon.url).build("x", b"", lambda line: None)


@pytest.mark.parametrize(
    "message",
    [
        "The command '/bin/sh -c exit 3' returned a non-zero code: 3",
        "The command '/bin/sh -c apt-get update; echo no such host' returned a non-zero code: 100",
        'process "/bin/sh -c exit 3" did not complete successfully: exit code: 3',
        "dockerfile parse error on line 2: unknown instruction: FORM",
        "unknown instruction: FORM",
        "manifest for debian:nope not found: manifest unknown: manifest unknown",
        "manifest unknown: manifest unknown",
        "no matching manifest for linux/arm64 in the manifest list entries",
        "pull access denied for nobody/x, repository does not exist or may require 'docker login'",
        "unauthorized: authentication required",
        "denied: requested access to the resource is denied",
        "docker.io/library/nope:latest: not found",
        "COPY failed: file not found in build context or excluded by .dockerignore: stat x: file does not exist",
        'failed to calculate checksum of ref x: "/missing": not found',
        "invalid reference format",
        'OCI runtime create failed: exec: "/bin/sh": stat /bin/sh: no such file or directory: unknown',
        "unable to find user nobody2: no matching entries in passwd file",
        "COPY failed: forbidden path outside the build context: ../x ()",
        "invalid containerPort: abc",
        "an answer that nobody has seen before",
    ],
)
async def test_a_step_a_dockerfile_and_a_base_image_are_the_tasks_own(message: str) -> None:
    said: list[str] = []
    async with DockerDaemonStandin() as daemon:
        daemon.refusal = (200, JSON, in_stream(message))
        with pytest.raises(BuildFailedError, match="cannot build x"):
            await DockerImageBuilder(daemon.url).build("x", b"", said.append)
    assert said[-1] == message


async def test_a_dockerfile_that_cannot_be_read_is_the_tasks_own() -> None:
    said: list[str] = []
    async with DockerDaemonStandin() as daemon:
        daemon.refusal = (400, JSON, '{"message": "dockerfile parse error line 1: unknown instruction: FORM"}')
        with pytest.raises(BuildFailedError, match="cannot build x"):
            await DockerImageBuilder(daemon.url).build("x", b"", said.append)
    assert said == ["dockerfile parse error line 1: unknown instruction: FORM"]


_PROGRAMS = {"docker": "echo no daemon; exit 1", "buildah": '[ "$1" = info ] || { echo "no base"; exit 1; }'}


@pytest.mark.parametrize(
    ("programs", "error", "message"),
    [
        (("docker", "buildah"), BuildFailedError, "`buildah build` has ended with status 1"),
        (("docker",), SandboxBusyError, "install one.*docker says: no daemon"),
        ((), SandboxBusyError, "none of docker, podman, buildah"),
    ],
)
async def test_a_program_whose_daemon_is_away_is_passed_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: tuple[str, ...],
    error: type[Exception],
    message: str,
) -> None:
    folder, context = tmp_path / "bin", tmp_path / "context"
    folder.mkdir()
    context.mkdir()
    for name in programs:
        (folder / name).write_text(f"#!/bin/sh\n{_PROGRAMS[name]}\n")
        (folder / name).chmod(0o755)
    (context / DOCKERFILE).write_text("FROM scratch\n")
    packed = pack_build_context(context)
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(error, match=message):
        await LocalImageBuilder(tmp_path / "images").build(packed.image, b64decode(packed.archive), lambda line: None)
