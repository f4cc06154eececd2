"""Build templates of E2B's cloud, or of a service with its API for builds, from Dockerfiles. An image
`ratchet-build:DIGEST` is the build with the tag DIGEST of the template `ratchet-build`."""

import asyncio
import io
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import BuildFailedError, SandboxBusyError, SandboxRefusesError
from sandboxes.base import ImageBuilder
from sandboxes.build_context import DOCKERFILE, unpack_build_context
from sandboxes.e2b_control_plane import ControlPlane
from sandboxes.e2b_errors import CONTENT_REFUSED, translated_errors

if TYPE_CHECKING:
    from e2b.template.logger import LogEntry

_SERVICE_FAULT = re.compile(r"5\d\d: ")
"""The beginning of the SDK's message if the service, and not a step of the build, has failed."""


class E2BImageBuilder:
    """Builds by the SDK. `api_url` None: that of the SDK's own variables. `of_gateway`: builds if the service is a
    local gateway, which has no builder of its own."""

    def __init__(self, api_key: str, api_url: str | None = None, of_gateway: ImageBuilder | None = None) -> None:
        self._options: dict[str, Any] = {"api_key": api_key}
        if api_url:
            self._options["api_url"] = api_url.rstrip("/")
        self._of_gateway = of_gateway

    async def build(self, image: str, context: bytes, on_lines: Callable[[str], None]) -> None:
        if self._of_gateway is not None and await ControlPlane(self._options).is_own_gateway():
            return await self._of_gateway.build(image, context, on_lines)

        def on_log(entry: "LogEntry") -> None:
            begun.append("Build ID: " in entry.message)
            on_lines(entry.message)

        begun: list[bool] = []
        from e2b import AsyncTemplate
        from e2b.exceptions import BuildException, FileUploadException, TemplateException

        with (
            tempfile.TemporaryDirectory(prefix="ratchet-build-") as name,
            translated_errors(f"the build of {image}", CONTENT_REFUSED),
        ):
            directory = Path(name) / "context"
            await asyncio.to_thread(unpack_build_context, image, context, directory)
            try:
                with redirect_stdout(io.StringIO()) as ignored:  # the SDK prints what it leaves out, and goes on
                    template = AsyncTemplate(file_context_path=directory).from_dockerfile(str(directory / DOCKERFILE))
                for line in ignored.getvalue().splitlines():
                    on_lines(f"left out of {image}: {line}")
                if "Unsupported instruction: SHELL" in ignored.getvalue():
                    raise ValueError("the SDK does not know SHELL, which later steps need; name the shell in each RUN")
                await AsyncTemplate.build(template, image, on_build_logs=on_log, **self._options)
            except FileUploadException as error:
                raise SandboxBusyError(f"the files of {image} cannot be uploaded: {error}") from error
            except BuildException as error:
                if _SERVICE_FAULT.match(str(error)):
                    raise SandboxBusyError(f"the sandbox service cannot build {image} now: {error}") from error
                if not any(begun):  # no step has run
                    raise SandboxRefusesError(f"the sandbox service starts no build of {image}: {error}") from error
                on_lines(str(error))
                raise BuildFailedError(f"the sandbox service cannot build {image}") from error
            except (TemplateException, ValueError) as error:  # the SDK reads most, not all, of what Docker reads
                on_lines(str(error))
                raise BuildFailedError(f"the SDK cannot read the Dockerfile of {image}") from error
