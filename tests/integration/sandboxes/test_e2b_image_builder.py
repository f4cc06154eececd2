"""The E2B SDK builds a template from a task's Dockerfile, and its errors are those of the contract."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.errors import BuildFailedError, SandboxBusyError, SandboxRefusesError
from sandbox_gateway.settings import GATEWAY_MARK
from sandboxes.build_context import pack_build_context
from sandboxes.e2b_image_builder import E2BImageBuilder
from tests.standins.e2b_builds import Builds, serving_builds
from tests.standins.http_server import LoopbackServer, QuietHandler


@pytest.fixture
def builds() -> Iterator[Builds]:
    with serving_builds() as builds:
        yield builds


async def build(builds: Builds, directory: Path, *steps: str) -> tuple[str, list[str]]:
    """Build an image of one file and these steps; return its name and the printed lines."""
    directory.mkdir()
    (directory / "Dockerfile").write_text("\n".join(["FROM python:3.12", "COPY shop.py /app/shop.py", *steps]))
    (directory / "shop.py").write_text("stock = 1\n")
    context = pack_build_context(directory)
    lines: list[str] = []
    await E2BImageBuilder("e2b_" + 40 * "0", builds.url).build(
        context.image, base64.b64decode(context.archive), lines.append
    )
    return context.image, lines


async def test_a_dockerfile_becomes_a_template_with_its_digest_as_tag(builds: Builds, tmp_path: Path) -> None:
    image, lines = await build(builds, tmp_path / "one", "RUN pip install pytest", "WORKDIR /app")
    assert builds.names == [image] and len(builds.uploads) == 1 and len(builds.uploads[0]) > 0
    assert builds.started[0]["fromImage"] == "python:3.12"
    assert any("pip install pytest" in line for line in lines)


@pytest.mark.parametrize(
    "step", ["HEALTHCHECK CMD true", "STOPSIGNAL SIGINT", "ONBUILD RUN true", "RUN --network=none true"]
)
async def test_what_the_sdk_leaves_out_of_a_dockerfile_is_told(builds: Builds, tmp_path: Path, step: str) -> None:
    image, lines = await build(builds, tmp_path / "one", step)
    assert builds.names == [image]
    (told,) = [line for line in lines if line.startswith(f"left out of {image}: ")]
    assert step.split()[0] in told or step.split()[1] in told or "network" in told


async def test_an_instruction_that_the_sdk_does_not_know_and_later_steps_need_is_refused(
    builds: Builds, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailedError, match="cannot read the Dockerfile"):
        await build(builds, tmp_path / "one", 'SHELL ["/bin/bash", "-c"]', "RUN [[ 1 = 1 ]]")
    assert not builds.names


async def test_a_failed_step_is_the_dockerfiles_and_a_service_that_is_away_is_not(
    builds: Builds, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailedError):
        await build(builds, tmp_path / "one", "RUN fail")
    with pytest.raises(BuildFailedError):  # a second stage
        await build(builds, tmp_path / "two", "FROM debian", "RUN true")
    for status in (500, 503, 429):
        builds.status = status
        with pytest.raises(SandboxBusyError):
            await build(builds, tmp_path / str(status))
    builds.url = "http://127.0.0.1:9"
    with pytest.raises(SandboxBusyError):
        await build(builds, tmp_path / "three")


async def test_only_an_error_of_a_build_that_has_begun_is_the_dockerfiles(builds: Builds, tmp_path: Path) -> None:
    for status in (201, 400, 404):
        builds.status = status
        with pytest.raises(SandboxRefusesError, match="starts no build"):
            await build(builds, tmp_path / str(status))


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_gateway_of_ours_is_known_by_its_mark_and_not_by_its_address(is_own: bool, tmp_path: Path) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            if is_own:
                self.send_header(GATEWAY_MARK, "1")
            self.end_headers()

        def do_POST(self) -> None:
            self.answer(404, b"404 page not found")

    class Local:
        async def build(self, image: str, context: bytes, on_lines: Callable[[str], None]) -> None:
            built.append(image)

    built: list[str] = []
    server = LoopbackServer(Handler)
    try:
        (tmp_path / "Dockerfile").write_text("FROM python:3.12\n")
        context = pack_build_context(tmp_path)
        making = E2BImageBuilder("e2b_x", server.url, Local()).build(
            context.image, base64.b64decode(context.archive), lambda _: None
        )
        if is_own:
            await making
        else:
            with pytest.raises(SandboxBusyError):
                await making
        assert built == ([context.image] if is_own else [])
    finally:
        server.close()
