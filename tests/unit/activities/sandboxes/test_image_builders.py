"""Which failures of a build are the Dockerfile's, and which are the Docker daemon's, that are waited for."""

import pytest

from activities.sandboxes.image_builders import DockerImageBuilder
from ratchet.errors import BuildFailedError, SandboxBusyError
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


async def test_a_dockerfile_that_cannot_be_read_is_the_tasks_own() -> None:
    said: list[str] = []
    async with DockerDaemonStandin() as daemon:
        daemon.refusal = (400, JSON, '{"message": "dockerfile parse error line 1: unknown instruction: FORM"}')
        with pytest.raises(BuildFailedError, match="cannot build x"):
            await DockerImageBuilder(daemon.url).build("x", b"", said.append)
    assert said == ["dockerfile parse error line 1: unknown instruction: FORM"]
