"""Run the gateway as a process: sockets, limits and signal handling."""

import fcntl
import os
import resource
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ratchet.errors import MachineError
from ratchet.web_server import WebServer
from sandbox_gateway.app import create_gateway_app
from sandbox_gateway.fork_client import ForkServer
from sandbox_gateway.image_store import ImageStore
from sandbox_gateway.images import Catalogue
from sandbox_gateway.machine_probe import find_bubblewrap, require_sandbox_support
from sandbox_gateway.settings import GatewaySettings

_KEEP_ALIVE_SECONDS = 330  # above the SDK pool's 300: the server must never be the first to close
_GRACEFUL_SECONDS = 2


def serve_gateway(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises MachineError if boxes cannot run here or the root directory is in use."""
    os.umask(0o022)  # users of boxes read what it makes
    require_sandbox_support()
    bubblewrap = find_bubblewrap()
    assert bubblewrap is not None, "require() has looked for it"
    settings.root_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _lock(settings.root_directory)
    try:
        images = ImageStore(settings.images_directory) if settings.images_directory is not None else None
        catalogue = Catalogue(settings.root_directory, images, settings.layers, settings.hidden_directories)
        serve_app(create_gateway_app(settings, catalogue, lambda: ForkServer(bubblewrap)), settings.host, settings.port)
    finally:
        os.close(lock)


def serve_app(app: Starlette, host: str, port: int) -> None:
    """Serve a gateway, or a front of several, until SIGTERM or SIGINT."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a box costs two files here and a command three
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,  # its lines go to the process's own handler
        log_level="warning",
        access_log=False,
        ws="none",  # websockets reach the port proxy as HTTP, which refuses them in words
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
    )
    WebServer(config).run()


def _lock(root: Path) -> int:
    """Lock the directory and return the fd; the kernel releases the lock when this process ends."""
    fd = os.open(root / "gateway.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise MachineError(f"Another gateway already uses {root}; stop it or choose another root directory.") from error
    return fd
