"""An S3 server (moto) in a process of its own, behind a connection that a test can cut in the middle of an answer."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from stack.ports import free_port

_START_SECONDS = 60.0
_PIECE_BYTES = 1 << 16


@dataclass
class CuttableLink:
    """Forwards TCP connections to `target`. Cut, it ends those that there are and refuses new ones."""

    target: int
    port: int = 0
    num_bytes: int = 0
    """Bytes of answers that were passed on so far."""
    cut_after_bytes: float = float("inf")
    _open: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, after_bytes: int = 0) -> None:
        """Cut the link once so many more bytes of answers have passed."""
        self.cut_after_bytes = self.num_bytes + after_bytes
        if not after_bytes:
            self._end_all()

    def mend(self) -> None:
        self.cut_after_bytes = float("inf")

    def close(self) -> None:
        self._listener.close()
        self._end_all()

    @property
    def is_cut(self) -> bool:
        return self.num_bytes >= self.cut_after_bytes

    def _end_all(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.target))
            self._open += [near, far]
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._forward, args=(source, sink, is_answer), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                sink.sendall(piece)
                self.num_bytes += len(piece) if is_answer else 0
                if self.is_cut:
                    self._end_all()
            sink.shutdown(socket.SHUT_WR)


@dataclass
class S3Storage:
    """The server as this process and those that it starts see it, by their environment."""

    link: CuttableLink

    def make_bucket(self, name: str) -> str:
        """Return the address of a new bucket."""
        import fsspec

        fsspec.filesystem("s3").mkdir(name)
        return f"s3://{name}"


@contextlib.contextmanager
def s3_storage() -> Iterator[S3Storage]:
    """Run the server during the block."""
    import fsspec

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    link = CuttableLink(port)
    try:
        _wait_for(f"http://127.0.0.1:{port}/moto-api/")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (
                ("AWS_ACCESS_KEY_ID", "test-key"),
                ("AWS_SECRET_ACCESS_KEY", "test-secret"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
                ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}"),
                ("AWS_MAX_ATTEMPTS", "1"),  # s3fs tries again, too
            ):
                patch.setenv(name, value)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            yield S3Storage(link)
            fsspec.get_filesystem_class("s3").clear_instance_cache()
    finally:
        link.close()
        process.terminate()
        process.wait()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
